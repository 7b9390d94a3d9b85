// SPDX-License-Identifier: Apache-2.0
// A convolution and the nodes behind it -> ONNX Runtime's FusedConv:
//
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

}  // namespace

void convolution(Graph& graph) {
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
