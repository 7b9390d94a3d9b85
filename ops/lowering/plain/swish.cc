// SPDX-License-Identifier: Apache-2.0
// Mul(x, Sigmoid(x)) -> Swish(x), and Mul(x, Sigmoid(Mul(x, alpha))) -> QuickGelu(x; alpha), in any
// order of the operands.
#include "ops/lowering/lowering.h"

namespace flownpu::lowering {
namespace {

// The constant factor of Mul(x, factor); null if the node is none.
const Value* factor_of(const Node* node, const Value& x) {
  if (node == nullptr) return nullptr;
  for (const std::size_t side : {0, 1}) {
    const Value& factor = node->inputs[1 - side];
    if (node->inputs[side].name == x.name && factor.constant != nullptr &&
        factor.type == DataType::kFloat32 && factor.shape && factor.shape->rank() == 0) {
      return &factor;
    }
  }
  return nullptr;
}

}  // namespace

void swish(Graph& graph) {
  graph.each("Mul", "", [&](Node& node) {
    for (const std::size_t side : {0, 1}) {
      const Value x = node.inputs[side];
      const Node* sigmoid = graph.only_producer(node.inputs[1 - side].name, "Sigmoid", "");
      if (sigmoid == nullptr) continue;
      const Value& gate = sigmoid->inputs[0];
      const Value* factor = factor_of(graph.only_producer(gate.name, "Mul", ""), x);
      if (gate.name != x.name && factor == nullptr) continue;
      node.op_type = factor == nullptr ? "Swish" : "QuickGelu";
      node.domain = factor == nullptr ? "" : "com.microsoft";
      node.since_version = factor == nullptr ? 24 : 1;  // the first version with the operator
      node.attributes.clear();
      if (factor != nullptr)
        node.attributes = {{"alpha", *static_cast<const float*>(factor->constant)}};
      node.inputs = {x};
      graph.changed();
      graph.applied("swish");
      return;
    }
  });
}

}  // namespace flownpu::lowering
