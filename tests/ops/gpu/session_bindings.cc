// SPDX-License-Identifier: Apache-2.0
// flownpu_testing.gpu: the device of a session, and what lies below it.
#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ops/choices.h"
#include "ops/gpu/decoder/stored_type.h"
#include "ops/gpu/kernels/kernels.h"
#include "ops/gpu/kernels/matrices/flow_attention.h"
#include "ops/gpu/kernels/states/kernels.h"
#include "ops/gpu/operators/run.h"
#include "ops/gpu/session_device.h"
#include "ops/shared_buffers.h"
#include "python/native/arrays.h"
#include "tests/ops/bindings.h"
#include "tests/ops/partition.h"

namespace nb = nanobind;
using namespace flownpu::gpu;  // NOLINT(google-build-using-namespace): the module is its face
using flownpu::native::Argument;
using flownpu::tests::Partition;

namespace {

std::map<std::string, std::int64_t> counts_of(const SessionDevice& device) {
  const Counts counts = device.counts().value_or(Counts());
  return {{"dispatches", counts.dispatches},       {"submissions", counts.submissions},
          {"recordings", counts.recordings},       {"barriers", counts.barriers},
          {"allocations", counts.allocations},     {"bytes_to_device", counts.bytes_to_device},
          {"bytes_to_host", counts.bytes_to_host}, {"compiled", counts.compiled},
          {"from_cache", counts.from_cache}};
}

flownpu::GpuDtype dtype_of(std::optional<bool> half) {
  if (!half) return flownpu::GpuDtype::kAuto;
  return *half ? flownpu::GpuDtype::kFloat16 : flownpu::GpuDtype::kFloat32;
}

flownpu::GpuWeights weights_of(std::optional<bool> image) {
  if (!image) return flownpu::GpuWeights::kAuto;
  return *image ? flownpu::GpuWeights::kImage : flownpu::GpuWeights::kBuffer;
}

}  // namespace

void bind_gpu_session(nb::module_& module) {
  nb::class_<SessionDevice>(module, "SessionDevice")
      .def(
          "__init__",
          [](SessionDevice* device, bool rounds, const std::string& opencl_device,
             std::optional<bool> half, std::optional<bool> image, bool vulkan,
             const std::string& matrices) {
            flownpu::DeviceOptions options;
            options.activations =
                rounds ? flownpu::Activations::kInt8 : flownpu::Activations::kBFloat16;
            options.opencl_device = opencl_device;
            options.gpu_dtype = dtype_of(half);
            options.gpu_weights = weights_of(image);
            options.gpu_matrices =
                flownpu::choose("gpu_matrices", matrices, flownpu::kGpuMatricesChoices);
            if (vulkan) options.gpu_api = flownpu::GpuApi::kVulkan;
            new (device) SessionDevice(options);
          },
          nb::arg("rounds") = false, nb::arg("opencl_device") = "", nb::arg("half") = nb::none(),
          nb::arg("image") = nb::none(), nb::arg("vulkan") = false, nb::arg("matrices") = "auto")
      .def_prop_ro("description", &SessionDevice::description)
      .def_prop_ro("warning", &SessionDevice::warning)
      .def(
          "lower",
          [](const SessionDevice& device, const Partition& partition,
             const std::vector<std::string>& outputs) {
            return device.lower(partition.nodes, {.model_folder = "", .outputs = outputs});
          },
          nb::arg("partition"), nb::arg("outputs"), nb::keep_alive<0, 2>())
      .def("prepare", &SessionDevice::prepare, nb::keep_alive<0, 1>())
      .def("restore",
           [](const SessionDevice& device, const std::vector<Argument>& tensors) {
             device.restore(flownpu::native::tensors_of(tensors));
           })
      .def("counts", &counts_of);
  // half: gpu_dtype is fp16 or fp32, None: auto
  module.def(
      "stored_type_of",
      [](bool has_half, std::optional<bool> half, std::int64_t wrong) {
        DeviceFacts facts;
        facts.has_half = has_half;
        return stored_type_of(facts, dtype_of(half), [=] { return wrong; }).text();
      },
      nb::arg("has_half"), nb::arg("half"), nb::arg("wrong"));
  module.def("storages_for", [](std::optional<bool> image, std::size_t bytes, std::int64_t texels) {
    DeviceFacts facts;
    facts.texels = texels;
    std::vector<std::string> names;
    for (const Storage storage : storages_for(weights_of(image), bytes, facts))
      names.emplace_back(storage == Storage::kImage ? "image" : "buffer");
    return names;
  });
  // with a piece of its text changed
  module.def("convert_halves", [](const std::string& piece, const std::string& by) {
    KernelDescription kernel = convert_halves();
    if (!piece.empty()) kernel.body.replace(kernel.body.find(piece), piece.size(), by);
    return kernel;
  });
  module.def("wrong_halves", [](Context& context, const KernelDescription& kernel) {
    const std::lock_guard lock(context.mutex());
    return wrong_halves(context, kernel);
  });
  // values: bytes, and the first and last step of each of the value's lifetimes
  module.def(
      "share_buffers",
      [](const std::vector<std::pair<std::size_t, std::vector<std::pair<int, int>>>>& values) {
        std::vector<flownpu::Lifetime> lifetimes;
        for (const auto& [bytes, steps] : values) lifetimes.push_back({bytes, steps});
        const flownpu::SharedBuffers shared = flownpu::share_buffers(lifetimes);
        return std::pair(shared.buffer, shared.bytes);
      });
  nb::class_<HeadsShape>(module, "Heads")
      .def(
          "__init__",
          [](HeadsShape* made, std::int64_t heads, std::int64_t kv_heads, std::int64_t head_size,
             const std::string& cache, float scale, bool qk_norm, float epsilon,
             std::int64_t rotated) {
            new (made) HeadsShape{.heads = heads,
                                  .kv_heads = kv_heads,
                                  .head_size = head_size,
                                  .cache = element_of_cache(flownpu::native::type_of(cache)),
                                  .scale = scale,
                                  .qk_norm = qk_norm,
                                  .epsilon = epsilon,
                                  .rotated = rotated};
          },
          nb::arg("heads"), nb::arg("kv_heads"), nb::arg("head_size"), nb::arg("cache"),
          nb::arg("scale"), nb::arg("qk_norm"), nb::arg("epsilon"), nb::arg("rotated") = 0);
  module.def("delta_rates", &delta_rates);
  module.def("sigmoid_gate", &sigmoid_gate);
  module.def("append_heads", &append_heads);
  module.def(
      "attention_of_sequence",
      [](std::int64_t heads, std::int64_t kv_heads, std::int64_t head_size, float softcap,
         bool has_blocks, bool in_tiles, std::int64_t lanes, std::int64_t tokens,
         const std::string& cache, bool has_sinks, const std::array<std::int64_t, 4>& matrices) {
        const AttentionShape shape{.heads = heads,
                                   .kv_heads = kv_heads,
                                   .head_size = head_size,
                                   .cache = element_of_cache(flownpu::native::type_of(cache)),
                                   .softcap = softcap,
                                   .one_sequence = true,
                                   .has_blocks = has_blocks,
                                   .in_tiles = in_tiles,
                                   .has_sinks = has_sinks,
                                   .lanes = lanes};
        if (matrices[0] > 0) {
          const MatrixUnits units{matrices[0], matrices[1], matrices[2], matrices[3]};
          return std::pair(flow_attention_of_matrices(shape, units),
                           flow_attention_of_matrices_grid(shape, units, 1, tokens).groups);
        }
        return std::pair(flow_attention(shape), flow_attention_grid(shape, 1, tokens).groups);
      },
      nb::arg("heads"), nb::arg("kv_heads"), nb::arg("head_size"), nb::arg("softcap"),
      nb::arg("has_blocks"), nb::arg("in_tiles") = false, nb::arg("lanes") = AttentionShape{}.lanes,
      nb::arg("tokens") = 1, nb::arg("cache") = "float", nb::arg("has_sinks") = false,
      nb::arg("matrices") = std::array<std::int64_t, 4>());
  // attention of a token that appends its key and value, as append_heads would
  module.def("appending_attention", [](const HeadsShape& heads, float softcap, std::int64_t parts,
                                       std::int64_t lanes, bool has_sinks) {
    const AttentionShape shape{.heads = heads.heads,
                               .kv_heads = heads.kv_heads,
                               .head_size = heads.head_size,
                               .cache = heads.cache,
                               .softcap = softcap,
                               .one_sequence = true,
                               .has_parts = parts > 1,
                               .appends = true,
                               .qk_norm = heads.qk_norm,
                               .epsilon = heads.epsilon,
                               .rotated = heads.rotated,
                               .scale = heads.scale,
                               .has_sinks = has_sinks,
                               .lanes = lanes};
    return std::tuple(flow_attention(shape), flow_attention_grid(shape, parts, 1).groups,
                      merge_attention(shape));
  });
  // a product with the normalised sum of x and an update, or of x alone
  module.def("normalising_product", [](std::int64_t rows, std::int64_t columns, bool has_skip,
                                       bool norms_skip, float epsilon) {
    const NormShape norm{.columns = columns,
                         .epsilon = epsilon,
                         .has_skip = has_skip,
                         .norms_skip = norms_skip,
                         .writes_sum = has_skip};
    const ProductShape shape{.rows = rows, .columns = columns, .norm = norm, .teams = 2};
    return std::pair(fused_dqp(shape), fused_dqp_grid(shape, 2).groups);
  });
  module.def(
      "attention_memory",
      [](std::int64_t heads, std::int64_t kv_heads, std::int64_t head_size) {
        return flow_attention_memory(
            {.heads = heads, .kv_heads = kv_heads, .head_size = head_size});
      },
      nb::arg("heads"), nb::arg("kv_heads"), nb::arg("head_size"));
  const auto in_parts = [](std::int64_t heads, std::int64_t kv_heads, std::int64_t head_size,
                           float softcap) {
    return AttentionShape{.heads = heads,
                          .kv_heads = kv_heads,
                          .head_size = head_size,
                          .softcap = softcap,
                          .one_sequence = true,
                          .has_parts = true};
  };
  module.def("attention_in_parts",
             [=](std::int64_t heads, std::int64_t kv_heads, std::int64_t head_size, float softcap) {
               const AttentionShape shape = in_parts(heads, kv_heads, head_size, softcap);
               return std::pair(flow_attention(shape), merge_attention(shape));
             });
  module.def(
      "entry_norm",
      [](std::int64_t columns, float epsilon) {
        return rms_norm({.columns = columns,
                         .epsilon = epsilon,
                         .has_skip = true,
                         .norms_skip = true,
                         .writes_sum = true});
      },
      nb::arg("columns"), nb::arg("epsilon"));
}
