// SPDX-License-Identifier: Apache-2.0
#include <nanobind/stl/map.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/variant.h>

#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ops/npu/device.h"
#include "ops/npu/match/layers.h"
#include "ops/npu/run/cache_memory.h"
#include "ops/transformer/cache/kv_caches.h"
#include "python/native/arrays.h"
#include "tests/npu/bindings.h"
#include "tests/ops/partition.h"

namespace nb = nanobind;
using namespace flownpu;       // NOLINT(google-build-using-namespace): the module is its face
using namespace flownpu::npu;  // NOLINT(google-build-using-namespace)
using flownpu::transformer::KvCache;
using flownpu::transformer::KvCaches;

namespace {

using native::Argument;
using tests::Attributes;
using tests::GivenNode;
using tests::Partition;

std::vector<std::string> names_of(const std::vector<Value>& values) {
  std::vector<std::string> names;
  for (const Value& value : values) names.push_back(value.name);
  return names;
}

nb::bytes packed_bytes(const Node& node, const std::string& name) {
  for (const Packed& packed : node.packed) {
    if (packed.name != name) continue;
    std::string bytes(packed.bytes, '\xff');
    packed.write({reinterpret_cast<std::byte*>(bytes.data()), bytes.size()});
    return nb::bytes(bytes.data(), bytes.size());
  }
  fail("nothing packed is called ", name);
}

void bind_lowering(nb::module_& module) {
  nb::class_<Partition>(module, "Partition")
      .def(nb::init<std::vector<GivenNode>>())
      .def_ro("nodes", &Partition::nodes, nb::rv_policy::reference_internal);
  nb::class_<Node>(module, "Node")
      .def_ro("name", &Node::name)
      .def_ro("op_type", &Node::op_type)
      .def_ro("domain", &Node::domain)
      .def_prop_ro("attributes",
                   [](const Node& node) {
                     return Attributes(node.attributes.begin(), node.attributes.end());
                   })
      .def_prop_ro("inputs", [](const Node& node) { return names_of(node.inputs); })
      .def_prop_ro("outputs", [](const Node& node) { return names_of(node.outputs); })
      .def("packed", packed_bytes);
  nb::class_<Lowered>(module, "Lowered")
      .def_ro("nodes", &Lowered::nodes, nb::rv_policy::reference_internal)
      .def_ro("summary", &Lowered::summary)
      .def_prop_ro("on_host", [](const Lowered& lowered) {
        std::vector<std::tuple<std::string, std::string, std::string>> items;
        for (const Lowered::OnHost& item : lowered.on_host)
          items.emplace_back(item.node, item.op_type, item.reason);
        return items;
      });
  module.def(
      "lower_layers",
      [](const Partition& partition, const std::vector<std::string>& outputs) {
        return lower_layers(partition.nodes, outputs);
      },
      nb::keep_alive<0, 1>());
}

void bind_device(nb::module_& module) {
  nb::class_<Step>(module, "Step")
      .def("infer",
           [](const Step& step, const std::vector<Argument>& inputs, std::size_t outputs) {
             std::vector<Shape> shapes(outputs);
             step.infer(native::tensors_of(inputs), shapes);
             std::vector<std::vector<std::int64_t>> lists;
             for (const Shape& shape : shapes) lists.emplace_back(shape.begin(), shape.end());
             return lists;
           })
      .def("run",
           [](const Step& step, const std::vector<Argument>& inputs,
              const std::vector<Argument>& outputs) {
             const std::vector<Tensor> in = native::tensors_of(inputs);
             const std::vector<Tensor> out = native::tensors_of(outputs);
             const nb::gil_scoped_release released;
             step.run(in, out, {});
           })
      .def("multiply_adds", &Step::multiply_adds);
  nb::class_<NpuDevice>(module, "NpuDevice")
      .def(
          "__init__",
          [](NpuDevice* device, const std::string& artifacts, bool emulated) {
            DeviceOptions options;
            options.artifacts = artifacts;
            options.activations = Activations::kBFloat16;
            new (device) NpuDevice(options, emulated);
          },
          nb::arg("artifacts") = "", nb::arg("emulated") = true)
      .def_prop_ro("name", &NpuDevice::name)
      .def_prop_ro("description", &NpuDevice::description)
      .def("unsupported", [](const NpuDevice& device,
                             const flownpu::Node& node) { return device.unsupported(node, {}); })
      .def(
          "lower",
          [](const NpuDevice& device, const Partition& partition, const std::string& folder,
             const std::vector<std::string>& outputs) {
            return device.lower(partition.nodes, {.model_folder = folder, .outputs = outputs});
          },
          nb::arg("partition"), nb::arg("folder") = "",
          nb::arg("outputs") = std::vector<std::string>{}, nb::keep_alive<0, 2>())
      .def("lower_again",
           [](const NpuDevice& device, const Lowered& lowered) {
             Lowering lowering;  // Every value is an output, so that no node is dead.
             for (const Node& node : lowered.nodes) {
               for (const Value& output : node.outputs) lowering.outputs.push_back(output.name);
             }
             return device.lower(lowered.nodes, lowering);
           })
      .def("compatibility",
           [](const NpuDevice& device, const std::string& folder) {
             return device.compatibility({.model_folder = folder});
           })
      .def("prepare", &NpuDevice::prepare, nb::keep_alive<0, 1>())
      .def("restore",
           [](const NpuDevice& device, const std::vector<Argument>& tensors) {
             device.restore(native::tensors_of(tensors));
           })
      .def("counts", [](const NpuDevice& device) {
        const Counts counts = device.counts();
        return std::map<std::string, std::uint64_t>{
            {"dispatches", counts.dispatches},           {"calls", counts.calls},
            {"bytes_to_device", counts.bytes_to_device}, {"bytes_to_host", counts.bytes_to_host},
            {"word_bytes", counts.word_bytes},           {"buffer_bytes", counts.buffer_bytes}};
      });
}

void bind_caches(nb::module_& module) {
  nb::class_<KvCache>(module, "KvCache")
      .def(
          "buffer",
          [](KvCache& cache) -> Buffer& {
            return static_cast<ArrayCacheMemory&>(cache.memory()).buffer();
          },
          nb::rv_policy::reference_internal);
  nb::class_<KvCaches>(module, "KvCaches")
      .def(
          "__init__",
          // windows: one for each layer; 0: its cache holds all positions
          [](KvCaches* caches, Runtime& runtime, const std::vector<std::int64_t>& windows,
             std::int64_t kv_heads, std::int64_t head_size, std::int64_t context) {
            DecoderShape shape;
            for (const std::int64_t window : windows)
              shape.layers.emplace_back().mixer =
                  transformer::Attention{.kv_heads = kv_heads,
                                         .head_size = head_size,
                                         .window = window,
                                         .window_sized_cache = window > 0};
            const std::size_t vector = shape.angle_bytes();
            const std::size_t position = static_cast<std::size_t>(kv_heads) * 2 * vector;
            const CacheLayout layout{.layer = static_cast<std::size_t>(context) * position,
                                     .position = position,
                                     .head = 2 * vector,
                                     .value = vector};
            const std::size_t bytes = windows.size() * layout.layer;
            check_layout(shape, context, layout, bytes);
            new (caches) KvCaches(
                shape,
                [&runtime, shape, layout, bytes]() -> std::unique_ptr<transformer::CacheMemory> {
                  return std::make_unique<ArrayCacheMemory>(runtime, shape, layout, bytes);
                });
          },
          nb::keep_alive<1, 2>())
      .def_ro_static("most", &KvCaches::kMost)
      .def("begin",
           [](KvCaches& caches, const std::vector<Argument>& pasts,
              const std::vector<Argument>& presents, std::int64_t past) {
             return caches.begin(native::tensors_of(pasts), native::tensors_of(presents), past,
                                 past);
           })
      .def("finish",
           [](KvCaches& caches, KvCache& cache, const std::vector<Argument>& presents,
              std::int64_t total) { caches.finish(cache, native::tensors_of(presents), total); })
      .def("restore",
           [](KvCaches& caches, const Argument& tensor) {
             return caches.restore(native::tensor_of(tensor));
           })
      .def("share", &KvCaches::share)
      // The cache that the host's run goes on from, or None.
      .def("lend", [](KvCaches& caches, const std::vector<Argument>& pasts,
                      std::int64_t past) { return caches.lend(native::tensors_of(pasts), past); })
      .def(
          "take_back",
          [](KvCaches& caches, std::shared_ptr<KvCache> cache,
             const std::vector<Argument>& presents, std::int64_t past, std::int64_t total) {
            caches.take_back(std::move(cache), native::tensors_of(presents), past, total);
          },
          nb::arg("cache").none(), nb::arg("presents"), nb::arg("past"), nb::arg("total"))
      .def("count", &KvCaches::count);
}

}  // namespace

void bind_npu_decoder(nb::module_& module) {
  const nb::exception<Unsupported> unsupported(module, "Unsupported", PyExc_RuntimeError);
  const nb::exception<DeviceFailed> failed(module, "DeviceFailed", PyExc_RuntimeError);
  bind_lowering(module);
  bind_device(module);
  bind_caches(module);
}
