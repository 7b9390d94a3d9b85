// SPDX-License-Identifier: Apache-2.0
// Describes what the NPU's array would compute of a graph that Python has read.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "ops/error.h"
#include "ops/npu/match/layers.h"
#include "python/native/bindings.h"

namespace nb = nanobind;

namespace flownpu::native {
namespace {

using Sizes = std::map<std::string, Attribute>;

Sizes describe(const std::vector<Node>& nodes, const std::vector<std::string>& outputs,
               const lowering::Promised& weights, bool decoder) {
  const nb::gil_scoped_release released;
  const Node layers = npu::describe_layers(nodes, outputs, weights);
  if (npu::is_decoder_layers(layers) != decoder) {
    fail("expected ", decoder ? "a decoder" : "an encoder of images", ", got ",
         decoder ? "an encoder of images" : "a decoder");
  }
  return {layers.attributes.begin(), layers.attributes.end()};
}

}  // namespace

void bind_describe(nb::module_& module) {
  const auto bind = [&](const char* name, bool decoder, const char* text) {
    module.def(
        name,
        [decoder](const std::vector<Node>& nodes, const std::vector<std::string>& outputs,
                  const lowering::Promised& weights) {
          return describe(nodes, outputs, weights, decoder);
        },
        nb::arg("nodes"), nb::arg("outputs"), nb::arg("weights") = lowering::Promised(), text);
  };
  bind("describe_decoder", true,
       "The sizes of the decoder in a graph that an NPU's array would compute, named as in "
       "DecoderSizes (ops/layers/decoder_sizes.h). Nodes, outputs and weights are those of "
       "Rewriting. Raises ValueError if there is none, with the reason that a session would give.");
  bind("describe_encoder", false,
       "The same for an encoder of images, named as in EncoderShape "
       "(ops/npu/nodes/encoder_shape.h).");
  module.def(
      "describe_operators",
      [](const std::vector<Node>& nodes, const std::vector<std::string>& outputs,
         const lowering::Promised& weights) {
        npu::GraphOperators found;
        {
          const nb::gil_scoped_release released;
          found = npu::describe_operators(nodes, outputs, weights);
        }
        std::vector<std::pair<std::string, Sizes>> sizes;
        sizes.reserve(found.sizes.size());
        for (const Node& node : found.sizes)
          sizes.emplace_back(node.op_type, Sizes{node.attributes.begin(), node.attributes.end()});
        return std::make_pair(sizes, found.left);
      },
      nb::arg("nodes"), nb::arg("outputs"), nb::arg("weights") = lowering::Promised(),
      "The operators of a graph that an NPU's array would compute one by one, each as (stem, "
      "sizes) named as in ops/npu/match/array_operator.h; and why it leaves others to the host.");
}

}  // namespace flownpu::native
