// SPDX-License-Identifier: Apache-2.0
// A convolution and the nodes around it -> ONNX Runtime's FusedConv:
//
//   Conv(Resize(X), W, B) of 3 x 3 taps, X twice as large by repetition
//                                                             -> FusedConv(X, W, B; upsample = 2)
//   Add(Conv(X, W, B), Z), with Z of the convolution's shape  -> FusedConv(X, W, B, Z)
//   Relu(Conv(..)), Relu(FusedConv(.., Z))                    -> FusedConv(..; activation = Relu)
#include <algorithm>

#include "ops/lowering/lowering.h"

namespace flownpu::lowering {
namespace {

// The inputs of FusedConv; the last is added.
constexpr std::size_t kFusedInputs = 4;
constexpr std::size_t kAdded = 3;

// The convolution that makes `value`, and that nothing else reads.
const Node* convolution_of(Graph& graph, const Value& value) {
  // FusedConv does not take bfloat16.
  if (value.type == DataType::kBFloat16) return nullptr;
  const Node* conv = graph.only_producer(value.name, "Conv", "");
  return conv != nullptr ? conv : graph.only_producer(value.name, "FusedConv", "com.microsoft");
}

void become_fused(Graph& graph, Node& node, const Node& conv) {
  node.name = conv.name;
  node.op_type = "FusedConv";
  node.domain = "com.microsoft";
  node.since_version = 1;
  node.attributes = conv.attributes;
  node.inputs = conv.inputs;
  node.inputs.resize(kFusedInputs);
  graph.changed();
  graph.applied("convolution");
}

bool is_same(const std::optional<Shape>& one, const std::optional<Shape>& other) {
  return one && other && *one == *other &&
         std::all_of(one->begin(), one->end(), [](std::int64_t size) { return size >= 0; });
}

// Whether the node makes images [N, C, H, W] twice as large, each pixel repeated along H and W.
bool repeats_pixels(const Node& resize) {
  const Value* scales = resize.input(2);
  const Shape unknown;
  if (scales == nullptr || scales->constant == nullptr || scales->type != DataType::kFloat32 ||
      resize.attributes.contains("axes") || resize.text("mode", "nearest") != "nearest" ||
      scales->shape.value_or(unknown).elements() != 4) {
    return false;
  }
  constexpr float kTwice[] = {1, 1, 2, 2};
  const std::string places = resize.text("coordinate_transformation_mode", "half_pixel");
  const std::string rounding = resize.text("nearest_mode", "round_prefer_floor");
  // Pixel i of the result is at i / 2, or at i / 2 - 1 / 4.
  const bool is_repetition = (places == "asymmetric" && rounding == "floor") ||
                             ((places == "half_pixel" || places == "pytorch_half_pixel") &&
                              rounding.starts_with("round_prefer"));
  return is_repetition &&
         std::ranges::equal(std::span(static_cast<const float*>(scales->constant), 4), kTwice);
}

// Whether the convolution has 3 x 3 neighbouring taps, pads that keep the images' size, and enough
// channels that products of tiles pay (ops/cpu/images/winograd.h).
bool takes_upsampled(const Node& conv) {
  constexpr std::int64_t kLeastChannels = 32;
  const Value& weight = conv.inputs[1];
  const auto all_are = [&](std::string_view name, std::int64_t expected, bool by_default) {
    const std::vector<std::int64_t> found = conv.integers(name);
    return found.empty() ? by_default
                         : std::ranges::all_of(found, [&](auto one) { return one == expected; });
  };
  return conv.inputs[0].type != DataType::kBFloat16 && weight.shape && weight.shape->rank() == 4 &&
         std::min((*weight.shape)[0], (*weight.shape)[1]) >= kLeastChannels &&
         (*weight.shape)[2] == 3 && (*weight.shape)[3] == 3 && conv.integer("group", 1) == 1 &&
         conv.text("auto_pad", "NOTSET") == "NOTSET" && all_are("pads", 1, false) &&
         all_are("strides", 1, true) && all_are("dilations", 1, true);
}

}  // namespace

void convolution(Graph& graph) {
  graph.each("Conv", "", [&](Node& node) {
    const Node* resize = graph.only_producer(node.inputs[0].name, "Resize", "");
    if (resize == nullptr || !repeats_pixels(*resize) || !takes_upsampled(node)) return;
    const Value images = resize->inputs[0];
    become_fused(graph, node, Node(node));
    node.attributes.insert_or_assign("upsample", std::int64_t{2});
    node.inputs[0] = images;
  });
  graph.each("Add", "", [&](Node& node) {
    for (const std::size_t side : {0, 1}) {
      const Node* conv = convolution_of(graph, node.inputs[side]);
      const Value z = node.inputs[1 - side];
      if (conv == nullptr || conv->input(kAdded) != nullptr ||
          !conv->text("activation", "").empty() || !is_same(conv->outputs[0].shape, z.shape)) {
        continue;
      }
      become_fused(graph, node, *conv);
      node.inputs[kAdded] = z;
      return;
    }
  });
  graph.each("Relu", "", [&](Node& node) {
    const Node* conv = convolution_of(graph, node.inputs[0]);
    if (conv == nullptr || !conv->text("activation", "").empty()) return;
    become_fused(graph, node, *conv);
    node.attributes.insert_or_assign("activation", std::string("Relu"));
  });
}

}  // namespace flownpu::lowering
