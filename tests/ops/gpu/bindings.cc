// SPDX-License-Identifier: Apache-2.0
// flownpu_testing.gpu: the kernel language, single kernels, and the layers below them.
#include "tests/ops/bindings.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ops/error.h"
#include "ops/gpu/context/program_cache.h"
#include "ops/gpu/context/tuner.h"
#include "ops/gpu/language/generate.h"
#include "ops/gpu/opencl/context.h"
#include "ops/gpu/opencl/loader.h"
#include "ops/gpu/opencl/status.h"
#include "ops/gpu/operators/run.h"
#include "ops/gpu/vulkan/context.h"

namespace nb = nanobind;
using namespace flownpu::gpu;  // NOLINT(google-build-using-namespace): the module is its face

namespace {

using Array = nb::ndarray<nb::c_contig, nb::device::cpu>;

Element element_of(const std::string& name) {
  constexpr std::array<const char*, 7> kNames{"float", "float16", "bfloat16", "int32",
                                              "int8",  "q4nx",    "int8 rows"};
  for (std::size_t i = 0; i < kNames.size(); ++i)
    if (name == kNames[i]) return static_cast<Element>(i);
  flownpu::fail("no element ", name);
}

std::span<std::byte> bytes_of(const Array& array) {
  return {static_cast<std::byte*>(array.data()), array.nbytes()};
}

// A context of the test's own, with its own folder of compiled kernels.
std::shared_ptr<Context> open(const std::string& device, const std::string& cache, bool vulkan) {
  if (vulkan) return std::make_shared<VulkanContext>(choose_vulkan_device(device), cache);
  return std::make_shared<OpenClContext>(choose_device(device), cache);
}

// Runs a kernel; arrays of tensors that are written get their content.
void run(Context& context, const KernelDescription& kernel,
         const std::array<std::int64_t, 3>& groups, const std::vector<Array>& arrays,
         const std::vector<std::int64_t>& parameters) {
  Run run(context);
  const std::vector<TensorDescription> tensors = kernel.arguments();
  std::vector<const Buffer*> buffers;
  std::deque<Buffer> images;
  for (const Array& array : arrays) {
    const std::size_t i = buffers.size();
    buffers.push_back(run.input(std::span<const std::byte>(bytes_of(array))));
    if (i < tensors.size() && tensors[i].storage == Storage::kImage)
      buffers.back() = &images.emplace_back(context.image_of(*buffers.back()));
  }
  run.launch(kernel, {.groups = groups, .lanes = kernel.lanes}, buffers, parameters);
  for (std::size_t i = 0; i < tensors.size(); ++i)
    if (tensors[i].access == Access::kWrite) run.read(buffers[i], bytes_of(arrays[i]));
}

// Buffers of a float each, on which a kernel (x, y; number) is launched, as `launches` say: x, y,
// and a number, to which the round is added. Each round begins with `content`. Returns what the
// buffers have at last, and (submissions, recordings, barriers, allocations) of each round.
std::pair<std::vector<float>, std::vector<std::array<std::int64_t, 4>>> run_rounds(
    Context& context, const KernelDescription& kernel,
    const std::vector<std::array<std::int64_t, 3>>& launches, std::vector<float> content,
    std::int32_t rounds) {
  const std::lock_guard lock(context.mutex());
  std::vector<Buffer> buffers;
  for (std::size_t i = 0; i < content.size(); ++i)
    buffers.push_back(context.allocate(sizeof(float)));
  const auto compiled = context.compile(kernel);
  std::vector<std::array<std::int64_t, 4>> spent;
  std::vector<float> found(content.size());
  for (std::int32_t round = 0; round < rounds; ++round) {
    const Counts before = context.counts();
    for (std::size_t i = 0; i < content.size(); ++i)
      context.write(buffers[i], std::as_bytes(std::span(&content[i], 1)));
    for (const auto& [x, y, number] : launches) {
      const std::array<KernelArgument, 3> arguments{&buffers[static_cast<std::size_t>(x)],
                                                    &buffers[static_cast<std::size_t>(y)],
                                                    static_cast<std::int32_t>(number) + round};
      context.launch(*compiled, arguments, {.lanes = kernel.lanes});
    }
    for (std::size_t i = 0; i < content.size(); ++i)
      context.read(buffers[i], std::as_writable_bytes(std::span(&found[i], 1)));
    const Counts& after = context.counts();
    spent.push_back({after.submissions - before.submissions, after.recordings - before.recordings,
                     after.barriers - before.barriers, after.allocations - before.allocations});
  }
  return {found, spent};
}

// Launches a kernel (x, y) whose x is the host's memory from the byte `offset` on, as it was after
// `change` bytes were set to 1 in it behind the import; false if the device does not take it.
bool run_in_place(Context& context, const KernelDescription& kernel,
                  const nb::ndarray<std::uint8_t, nb::c_contig>& memory, std::size_t offset,
                  std::size_t change, const nb::ndarray<float, nb::c_contig>& y) {
  const std::lock_guard lock(context.mutex());
  const std::span bytes(memory.data(), memory.size());
  const Buffer x = context.use(std::as_bytes(bytes).subspan(offset), nullptr);
  if (x.handle() == nullptr) return false;
  std::ranges::fill(bytes.subspan(offset, change), std::uint8_t{1});
  const Buffer written = context.allocate(y.size() * sizeof(float));
  const std::array<KernelArgument, 2> arguments{&x, &written};
  context.launch(*context.compile(kernel), arguments, {.lanes = kernel.lanes});
  context.read(written, std::as_writable_bytes(std::span(y.data(), y.size())));
  return true;
}

// Launches a kernel (x, y), then, before it has to have run, writes zeros over x, or frees it and
// writes them to a new buffer of its size. y gets what the kernel computed.
void run_before_zeros(Context& context, const KernelDescription& kernel,
                      const nb::ndarray<float, nb::c_contig>& given,
                      const nb::ndarray<float, nb::c_contig>& y, bool frees) {
  const std::lock_guard lock(context.mutex());
  const std::vector<float> zeros(given.size());
  Buffer x = context.allocate(given.size() * sizeof(float));
  context.write(x, std::as_bytes(std::span(given.data(), given.size())));
  const Buffer written = context.allocate(y.size() * sizeof(float));
  const auto compiled = context.compile(kernel);
  const std::array<KernelArgument, 2> arguments{&x, &written};
  context.launch(*compiled, arguments, {.lanes = kernel.lanes});
  if (frees) x = Buffer();
  if (frees) x = context.allocate(zeros.size() * sizeof(float));
  context.write(x, std::as_bytes(std::span(zeros)));
  context.read(written, std::as_writable_bytes(std::span(y.data(), y.size())));
}

void bind_language(nb::module_& module) {
  nb::class_<TensorDescription>(module, "Tensor")
      .def(
          "__init__",
          [](TensorDescription* made, const std::string& name, const std::string& element,
             const std::vector<Size>& sizes, bool written, int group_bits, bool has_minima,
             bool in_image) {
            new (made)
                TensorDescription{.name = name,
                                  .element = element_of(element),
                                  .access = written ? Access::kWrite : Access::kRead,
                                  .sizes = sizes,
                                  .layout = {.group_bits = group_bits, .has_minima = has_minima},
                                  .storage = in_image ? Storage::kImage : Storage::kBuffer};
          },
          nb::arg("name"), nb::arg("element"), nb::arg("sizes"), nb::arg("written") = false,
          nb::arg("group_bits") = 0, nb::arg("has_minima") = true, nb::arg("in_image") = false);
  nb::class_<Link>(module, "Link")
      .def(
          "__init__",
          [](Link* made, const std::string& code, const std::vector<TensorDescription>& tensors) {
            new (made) Link{code, tensors};
          },
          nb::arg("code"), nb::arg("tensors") = std::vector<TensorDescription>());
  nb::class_<KernelDescription>(module, "Kernel")
      .def(
          "__init__",
          [](KernelDescription* made, const std::string& body,
             const std::vector<TensorDescription>& tensors, const Constants& constants,
             const std::vector<std::string>& parameters, std::int64_t lanes,
             const std::map<std::string, std::vector<Link>>& links) {
            new (made) KernelDescription{.name = "tried",
                                         .body = body,
                                         .tensors = tensors,
                                         .constants = constants,
                                         .parameters = parameters,
                                         .lanes = lanes,
                                         .links = links};
          },
          nb::arg("body"), nb::arg("tensors"), nb::arg("constants") = Constants(),
          nb::arg("parameters") = std::vector<std::string>(), nb::arg("lanes") = 1,
          nb::arg("links") = std::map<std::string, std::vector<Link>>());
  module.def("generate",
             [](const KernelDescription& kernel) { return generate(kernel, opencl_c()); });
  module.def("spirv", [](const KernelDescription& kernel) {
    const std::string made = generate(kernel, spirv_for_vulkan());
    return nb::bytes(made.data(), made.size());
  });
}

}  // namespace

void bind_gpu(nb::module_& module) {
  bind_language(module);
  nb::class_<Context>(module, "Context")
      .def_prop_ro("compiled", [](const Context& context) { return context.counts().compiled; })
      .def_prop_ro("from_cache", [](const Context& context) { return context.counts().from_cache; })
      .def_prop_ro("dispatches", [](const Context& context) { return context.counts().dispatches; })
      .def_prop_ro("reads_host_memory",
                   [](const Context& context) { return context.facts().reads_host_memory; })
      .def_prop_ro("work_group", [](const Context& context) { return context.facts().work_group; })
      .def_prop_ro("cache_problem",
                   [](const Context& context) { return context.cache().problem(); })
      .def("allocate",
           [](Context& context, std::size_t bytes) { return context.allocate(bytes).bytes(); })
      .def("run", &run, nb::arg("kernel"), nb::arg("groups"), nb::arg("arrays"),
           nb::arg("parameters") = std::vector<std::int64_t>());
  module.def("run_rounds", &run_rounds);
  module.def("run_in_place", &run_in_place);
  module.def("run_before_zeros", &run_before_zeros);
  module.def("open", &open, nb::arg("device") = "", nb::arg("cache") = "",
             nb::arg("vulkan") = false);
  // Takes kernels that write one float.
  module.def(
      "fastest",
      [](Context& context, const std::string& what, const std::vector<KernelDescription>& kernels) {
        const Buffer y = context.allocate(sizeof(float));
        const std::array<KernelArgument, 1> arguments{&y};
        return Tuner(context).fastest(what, kernels.size(), [&](std::size_t way) {
          const KernelDescription& kernel = kernels[way];
          context.launch(*context.compile(kernel), arguments, {.lanes = kernel.lanes});
        });
      },
      nb::arg("context"), nb::arg("what"), nb::arg("kernels"));
  module.def("load", [](const std::string& file) { load_opencl(file); });
  module.def("check", [](int code, const std::string& call, const std::string& what,
                         const std::string& details) { check(code, call, what, details); });
  module.def("name_of_code", &name_of_code);
  module.def("constants", [] {
    return std::map<std::string, std::uint64_t>{
        {"platform_info.VERSION", cl::kPlatformVersion},
        {"platform_info.NAME", cl::kPlatformName},
        {"device_type.ALL", cl::kEveryType},
        {"device_type.CPU", cl::kTypeCpu},
        {"device_type.GPU", cl::kTypeGpu},
        {"device_info.TYPE", cl::kDeviceType},
        {"device_info.MAX_COMPUTE_UNITS", cl::kDeviceComputeUnits},
        {"device_info.MAX_WORK_GROUP_SIZE", cl::kDeviceWorkGroupSize},
        {"device_info.MAX_MEM_ALLOC_SIZE", cl::kDeviceAllocation},
        {"device_info.IMAGE_SUPPORT", cl::kDeviceImages},
        {"device_info.GLOBAL_MEM_SIZE", cl::kDeviceMemory},
        {"device_info.LOCAL_MEM_SIZE", cl::kDeviceLocalMemory},
        {"device_info.AVAILABLE", cl::kDeviceAvailable},
        {"device_info.COMPILER_AVAILABLE", cl::kDeviceCompiler},
        {"device_info.NAME", cl::kDeviceName},
        {"device_info.VENDOR", cl::kDeviceVendor},
        {"device_info.DRIVER_VERSION", cl::kDriverVersion},
        {"device_info.VERSION", cl::kDeviceVersion},
        {"device_info.EXTENSIONS", cl::kDeviceExtensions},
        {"device_info.HOST_UNIFIED_MEMORY", cl::kDeviceUnifiedMemory},
        {"device_info.IMAGE_MAX_BUFFER_SIZE", cl::kDeviceTexels},
        {"channel_order.RGBA", cl::kRgba},
        {"channel_type.UNSIGNED_INT32", cl::kUnsigned32},
        {"mem_object_type.IMAGE1D_BUFFER", cl::kImageOfBuffer},
        {"command_queue_properties.PROFILING_ENABLE", cl::kProfiling},
        {"mem_flags.READ_WRITE", cl::kReadWrite},
        {"program_info.BINARY_SIZES", cl::kProgramBinarySizes},
        {"program_info.BINARIES", cl::kProgramBinaries},
        {"program_build_info.LOG", cl::kBuildLog},
        {"profiling_info.QUEUED", cl::kEventQueued},
        {"profiling_info.START", cl::kEventStart},
        {"command_execution_status.COMPLETE", static_cast<std::uint64_t>(cl::kComplete)},
        {"profiling_info.END", cl::kEventEnd},
        {"context_properties.PLATFORM", static_cast<std::uint64_t>(cl::kContextPlatform)}};
  });
}
