// SPDX-License-Identifier: Apache-2.0
// Binds the OpenCL platforms and devices of this machine, and the times that kernels took.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ops/gpu/decoder/stored_type.h"
#include "ops/gpu/device.h"
#include "ops/gpu/opencl/devices.h"
#include "ops/gpu/opencl/loader.h"
#include "ops/gpu/opencl/status.h"
#include "ops/gpu/vulkan/devices.h"
#include "python/native/bindings.h"

namespace nb = nanobind;

namespace flownpu::native {
namespace {

std::string problem_of_loader() {
  try {
    gpu::opencl();
    return "";
  } catch (const gpu::GpuError& error) {
    return error.what();
  }
}

std::vector<gpu::DeviceFacts> facts_of_all() {
  std::vector<gpu::DeviceFacts> all;
  for (const gpu::FoundDevice& found : gpu::devices()) all.push_back(found.facts);
  return all;
}

// Raises RuntimeError where they cannot be listed.
std::vector<std::pair<gpu::DeviceFacts, std::string>> vulkan_devices() {
  std::vector<std::pair<gpu::DeviceFacts, std::string>> all;
  for (const gpu::VulkanDevice& found : gpu::vulkan_devices())
    all.emplace_back(found.facts, found.missing);
  return all;
}

// Why there is no Vulkan at all, for `flownpu doctor`; empty if there is.
std::string problem_of_vulkan() {
  try {
    gpu::vulkan_devices();
    return "";
  } catch (const gpu::GpuError& error) {
    const gpu::Failure failure = error.failure();
    if (failure == gpu::Failure::kNoLoader || failure == gpu::Failure::kNoPlatform)
      return error.what();
    throw;
  }
}

const char* name_of(gpu::DeviceKind kind) {
  switch (kind) {
    case gpu::DeviceKind::kGpu:
      return "gpu";
    case gpu::DeviceKind::kCpu:
      return "cpu";
    case gpu::DeviceKind::kOther:
      break;
  }
  return "other";
}

std::vector<std::pair<std::string, double>> take_times(const gpu::GpuDevice& device) {
  std::vector<gpu::KernelTime> times;
  {
    const nb::gil_scoped_release released;
    const std::shared_ptr<gpu::Context> context = device.context();
    const std::lock_guard lock(context->mutex());
    times = context->take_times();
  }
  std::vector<std::pair<std::string, double>> found;
  found.reserve(times.size());
  for (const gpu::KernelTime& time : times) found.emplace_back(time.kernel, time.seconds);
  return found;
}

std::string stored_type(const gpu::GpuDevice& device) {
  const nb::gil_scoped_release released;
  const std::shared_ptr<gpu::Context> context = device.context();
  const std::lock_guard lock(context->mutex());
  return gpu::choose_stored_type(*context, GpuDtype::kAuto).text();
}

nb::dict counts(const gpu::GpuDevice& device) {
  const std::shared_ptr<gpu::Context> context = device.context();
  const std::lock_guard lock(context->mutex());
  const gpu::Counts& found = context->counts();
  nb::dict all;
  all["dispatches"] = found.dispatches;
  all["bytes_to_device"] = found.bytes_to_device;
  all["bytes_to_host"] = found.bytes_to_host;
  all["compiled"] = found.compiled;
  all["from_cache"] = found.from_cache;
  return all;
}

}  // namespace

void bind_gpu(nb::module_& module) {
  using gpu::DeviceFacts;
  nb::class_<DeviceFacts>(module, "GpuFacts", "What a device of OpenCL or Vulkan says of itself.")
      .def_ro("platform", &DeviceFacts::platform)
      .def_ro("platform_version", &DeviceFacts::platform_version)
      .def_ro("name", &DeviceFacts::name)
      .def_ro("vendor", &DeviceFacts::vendor)
      .def_ro("driver", &DeviceFacts::driver)
      .def_ro("version", &DeviceFacts::version)
      .def_prop_ro(
          "kind", [](const DeviceFacts& facts) { return name_of(facts.kind); },
          "gpu, cpu or other.")
      .def_prop_ro("title", &DeviceFacts::title)
      .def_ro("compute_units", &DeviceFacts::compute_units)
      .def_ro("work_group", &DeviceFacts::work_group)
      .def_ro("local_memory", &DeviceFacts::local_memory)
      .def_ro("memory", &DeviceFacts::memory)
      .def_ro("allocation", &DeviceFacts::allocation)
      .def_ro("unified_memory", &DeviceFacts::unified_memory)
      .def_ro("has_images", &DeviceFacts::has_images)
      .def_ro("texels", &DeviceFacts::texels)
      .def_ro("has_half", &DeviceFacts::has_half)
      .def_ro("has_integer_dot", &DeviceFacts::has_integer_dot)
      .def_ro("has_subgroups", &DeviceFacts::has_subgroups)
      .def_prop_ro(
          "matrices",
          [](const DeviceFacts& facts) { return facts.matrices ? facts.matrices->text() : ""; },
          "The matrix units that kernels use: \"16 x 16 x 16 in 32 lanes\"; \"\": there are none.");
  module.def("problem_of_opencl_loader", problem_of_loader,
             "Why OpenCL's loader could not be loaded; empty if it was.");
  module.def("opencl_platforms", gpu::platforms,
             "Names of OpenCL's platforms. Raises ValueError without a loader.");
  module.def("opencl_devices", facts_of_all,
             "GpuFacts of all devices that are available. Raises ValueError without a loader.");
  module.def("problem_of_vulkan", problem_of_vulkan,
             "Why there is no Vulkan on this machine, its loader or a driver; empty if there is.");
  module.def("vulkan_devices", vulkan_devices,
             "(GpuFacts, what kernels need that it lacks) of all devices of Vulkan.");
  nb::class_<gpu::GpuDevice, Device>(module, "GpuDevice", "Computes nodes with OpenCL or Vulkan.")
      .def_prop_ro(
          "facts", [](const gpu::GpuDevice& device) { return device.context()->facts(); },
          "GpuFacts of the device that computes.")
      .def_prop_ro(
          "cache_problem",
          [](const gpu::GpuDevice& device) { return device.context()->cache().problem(); },
          "Why the last compiled kernel was not kept on disk; empty if it was.")
      .def("stored_type", &stored_type,
           "The type in which decoders' kernels store activations on this device, and why: fp32 "
           "(...).")
      .def("counts", &counts, "Dispatches, bytes moved, kernels compiled and read, so far.")
      .def("take_times", &take_times,
           "(kernel, seconds by the device's clock) of each dispatch since the last call of this.");
}

}  // namespace flownpu::native
