// SPDX-License-Identifier: Apache-2.0
// Binds the descriptions of decoders and encoders, and finds them in graphs that Python has read.
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
#include "ops/npu/match/convolution.h"
#include "ops/npu/match/layers.h"
#include "ops/npu/nodes/encoder_shape.h"
#include "ops/transformer/decoder_matcher.h"
#include "python/native/bindings.h"
#include "python/native/description.h"

namespace nb = nanobind;

namespace flownpu::native {
namespace {

using Sizes = std::map<std::string, Attribute>;

using transformer::Attention;
using transformer::Decoder;
using transformer::FeedForward;
using transformer::Layer;
using Nodes = std::vector<Node>;
using Outputs = std::vector<std::string>;

// The node that the array would compute, which must be a decoder's or an encoder's.
Node describe(const Nodes& nodes, const Outputs& outputs, const lowering::Promised& weights,
              bool decoder) {
  Node layers = npu::describe_layers(nodes, outputs, weights);
  if (npu::is_decoder_layers(layers) != decoder) {
    fail("expected ", decoder ? "a decoder" : "an encoder of images", ", got ",
         decoder ? "an encoder of images" : "a decoder");
  }
  return layers;
}

// The decoder of a converted graph, of dense layers without biases in which RoPE has one table.
Decoder find(const Nodes& nodes, const Outputs& outputs) {
  const transformer::DecoderLimits limits{.who = "reading a converted model back",
                                          .means = "decoders that are read back",
                                          .softcap = true,
                                          .batches = true,
                                          .int8_caches = true,
                                          .all_logits = true};
  const transformer::GraphWalk graph(nodes, outputs);
  return transformer::find_decoder(nodes, graph, limits).decoder;
}

nb::dict layer_fields(const Layer& layer) {
  nb::dict fields = as_dict(layer);
  std::visit([&](const auto& mixer) { fields[mixer.kName.data()] = as_dict(mixer); }, layer.mixer);
  fields[FeedForward::kName.data()] = as_dict(layer.feed_forward);
  return fields;
}

nb::dict decoder_fields(const Decoder& decoder) {
  nb::dict fields = as_dict(decoder);
  nb::list layers;
  for (const Layer& layer : decoder.layers) layers.append(layer_fields(layer));
  fields["layers"] = layers;
  return fields;
}

void bind_decoder(nb::module_& module) {
  bind_fields<Attention>(module, "Attention", "The attention of a layer, with packed QKV.");
  bind_fields<transformer::GatedDelta>(module, "GatedDelta",
                                       "A gated delta rule, in the place of a layer's attention.");
  bind_fields<transformer::ShortConvolution>(
      module, "ShortConvolution",
      "A short convolution between two gates, in the place of a layer's attention.");
  bind_fields<FeedForward>(module, "FeedForward", "A gated feed-forward, or a mixture of them.")
      .def_prop_ro("gate_up_rows", &FeedForward::gate_up_rows,
                   "rows of the matrices that read the hidden state");
  bind_fields<Layer>(module, "Layer", "A layer of a decoder: a mixer, then a feed-forward.",
                     layer_fields)
      .def(
          "__init__",
          [](Layer* self, const transformer::Mixer& mixer, const FeedForward& feed_forward,
             bool post_norms, bool norms_before, std::int64_t eight_bits) {
            new (self) Layer{mixer, feed_forward, post_norms, norms_before, eight_bits};
          },
          nb::arg("mixer"), nb::arg("feed_forward"), nb::arg("post_norms") = false,
          nb::arg("norms_before") = true, nb::arg("eight_bits") = 0)
      .def_ro("mixer", &Layer::mixer)
      .def_ro("feed_forward", &Layer::feed_forward);
  bind_fields<Decoder>(
      module, "Decoder",
      "A decoder's layers: what devices, programs, predictions and reports read of a model "
      "(ops/transformer/decoder.h).",
      decoder_fields)
      .def(
          "__init__",
          [](Decoder* self, const std::vector<Layer>& layers, const nb::kwargs& fields) {
            if (layers.empty()) fail("[decoder] expected layers, got none");
            new (self) Decoder(from_keywords<Decoder>(fields));
            self->layers = layers;
          },
          nb::sig("def __init__(self, layers: Sequence[Layer], **fields: int | float) -> None"))
      .def_ro("layers", &Decoder::layers)
      .def("input_rows", &Decoder::input_rows, nb::arg("layer"),
           "Rows of the projections of a layer's input.")
      .def("output_columns", &Decoder::output_columns, nb::arg("layer"),
           "Columns of a layer's output projection.")
      .def_prop_ro(
          "tables", [](const Decoder& decoder) { return decoder.tables(); },
          "The number of rotary tables.")
      .def_prop_ro(
          "attributes",
          [](const Decoder& decoder) {
            Node node;
            decoder.write(node);
            return Sizes{node.attributes.begin(), node.attributes.end()};
          },
          "The attributes of the node that the layers become on a device.");
}

void bind_convolution(nb::module_& module) {
  using npu::ConvolutionSizes;
  bind_fields<ConvolutionSizes>(module, "ConvolutionSizes",
                                "A convolution of channels-last pictures as the array computes it, "
                                "and how they lie in memory (ops/npu/match/convolution.h).")
      .def_ro_static("RUN_UNIT", &ConvolutionSizes::kRunUnit,
                     "k_mt of the array that sessions' programs have.")
      .def_ro_static("LEAST_FILTERS", &ConvolutionSizes::kLeastFilters,
                     "Columns of a column of its tiles.")
      .def_prop_ro("lines", &ConvolutionSizes::lines, "Of a picture of the output.")
      .def_prop_ro("pixels", &ConvolutionSizes::pixels, "Of a line of the output.")
      .def_prop_ro("line", &ConvolutionSizes::line,
                   "Pixels from line to line, padding included; a multiple of the stride.")
      .def_prop_ro("padded_lines", &ConvolutionSizes::padded_lines,
                   "Lines from picture to picture, padding included.")
      .def_prop_ro("head", &ConvolutionSizes::head, "Pixels of zeros before the first picture.")
      .def_prop_ro("picture_rows", &ConvolutionSizes::picture_rows,
                   "Rows of the product from picture to picture.")
      .def_prop_ro("padded_filters", &ConvolutionSizes::padded_filters,
                   "N: filters in whole panels, at least a column of tiles.")
      .def("rows", &ConvolutionSizes::rows, nb::arg("pictures"),
           "M: rows of the product up to the last pixel.")
      .def("run", &ConvolutionSizes::run, nb::arg("k_mt"),
           "Rows of the filters as packed for a line of taps, a multiple of k_mt.");
}

void bind_encoder(nb::module_& module) {
  using npu::DenseProjection;
  using npu::EncoderShape;
  nb::class_<DenseProjection>(module, "DenseProjection",
                              "A product y [columns] = act(W x + b) of x [inner].")
      .def(
          "__init__",
          [](DenseProjection* self, std::int64_t inner, std::int64_t columns, bool has_bias) {
            new (self) DenseProjection{.inner = inner, .columns = columns, .has_bias = has_bias};
          },
          nb::arg("inner"), nb::arg("columns"), nb::arg("has_bias"))
      .def_ro("inner", &DenseProjection::inner)
      .def_ro("columns", &DenseProjection::columns)
      .def_ro("has_bias", &DenseProjection::has_bias)
      .def_ro("gelu", &DenseProjection::gelu)
      .def_prop_ro("rows", &DenseProjection::rows,
                   "K of the call: with a bias, up to the row of the weight that holds the bias.")
      .def_prop_ro("padded_rows", &DenseProjection::padded_rows,
                   "Rows of the weight in memory; with a bias, elements of a line of activations.")
      .def_prop_ro("padded_columns", &DenseProjection::padded_columns, "N of the call.")
      .def_prop_ro("bytes", &DenseProjection::bytes,
                   "Bytes of the weight in memory, padding included.");
  bind_fields<EncoderShape>(module, "EncoderShape",
                            "The sizes of an encoder of images (ops/npu/nodes/encoder_shape.h).")
      .def_prop_ro("patches", &EncoderShape::patches, "Patches of an image.")
      .def_prop_ro("tokens", &EncoderShape::tokens, "Tokens of an image, after pooling.")
      .def_prop_ro("embedding", &EncoderShape::embedding, "The product that embeds a patch.")
      .def_prop_ro(
          "projections",
          [](const EncoderShape& encoder) {
            const auto all = encoder.projections();
            return std::vector(all.begin(), all.end());
          },
          "QKV, output, up, down.")
      .def_prop_ro("projector", &EncoderShape::projector,
                   "The product that brings a pooled token to the decoder's hidden size.");
}

}  // namespace

void bind_describe(nb::module_& module) {
  bind_decoder(module);
  bind_convolution(module);
  bind_encoder(module);
  module.def(
      "describe_decoder",
      [](const Nodes& nodes, const Outputs& outputs, const lowering::Promised& weights) {
        const nb::gil_scoped_release released;
        return Decoder::read(describe(nodes, outputs, weights, true));
      },
      nb::arg("nodes"), nb::arg("outputs"), nb::arg("weights") = lowering::Promised(),
      "The decoder in a graph that an NPU's array would compute. Nodes, outputs and weights are "
      "those of Rewriting. Raises ValueError if there is none, with the reason that a session "
      "would give.");
  module.def(
      "describe_encoder",
      [](const Nodes& nodes, const Outputs& outputs, const lowering::Promised& weights) {
        const nb::gil_scoped_release released;
        return npu::EncoderShape::read(describe(nodes, outputs, weights, false));
      },
      nb::arg("nodes"), nb::arg("outputs"), nb::arg("weights") = lowering::Promised(),
      "The same for an encoder of images.");
  module.def(
      "unsupported_by_array",
      [](const Decoder& decoder) {
        for (const Layer& layer : decoder.layers) {
          for (const std::string& reason :
               {layer.has_attention()
                    ? transformer::unsupported(layer.attention(), npu::array_limits())
                    : std::string(),
                transformer::unsupported(layer.feed_forward, npu::array_limits())}) {
            if (!reason.empty()) return reason;
          }
        }
        return std::string();
      },
      nb::arg("decoder"), "Why an NPU's array does not compute such layers; empty if it does.");
  module.def(
      "find_decoder",
      [](const Nodes& nodes, const Outputs& outputs) {
        const nb::gil_scoped_release released;
        return find(nodes, outputs);
      },
      nb::arg("nodes"), nb::arg("outputs"),
      "The decoder in a graph of a converted model, whichever device computes it. Raises "
      "ValueError if there is none, or one with biases or more than one RoPE table at a time.");
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
