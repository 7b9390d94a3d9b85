// SPDX-License-Identifier: Apache-2.0
// Gate and up projection run over the same input, and the epilogue joins them:
//
//   act(Q4NXMatMul(X, Wg)) * Q4NXMatMul(X, Wu) -> Q4NXMatMul(X, [Wg; Wu]; gating)
//
// gating = "geglu" for act = GELU with the tanh approximation, "swiglu" for act(g) = g sigmoid(g).
// Each weight is padded to whole blocks of 32 rows, so any number of rows will do.
#include <optional>
#include <string>
#include <utility>

#include "ops/lowering/lowering.h"

namespace flownpu::lowering {
namespace {

bool is_projection(const Node* node) {
  return node != nullptr && node->op_type == "Q4NXMatMul" && node->domain == kDomain &&
         node->inputs.size() == 2 && node->text("gating", "none") == "none";
}

struct Activated {
  Node* gate = nullptr;
  const char* gating = nullptr;
};

// The gate's projection, if `value` is its activation for this product alone.
Activated activated(Graph& graph, const std::string& value) {
  Node* node = graph.producer(value);
  if (node == nullptr || graph.readers(value) != 1) return {};
  const bool gelu = node->op_type == "Gelu" && node->domain.empty() &&
                    node->text("approximate", "none") == "tanh";
  const bool fast_gelu =
      node->op_type == "FastGelu" && node->domain == "com.microsoft" && node->input(1) == nullptr;
  if (gelu || fast_gelu) {
    Node* gate = graph.producer(node->inputs[0].name);
    if (is_projection(gate) && graph.readers(node->inputs[0].name) == 1) return {gate, "geglu"};
    return {};
  }
  if (node->op_type != "Mul" || !node->domain.empty()) return {};
  for (const int side : {0, 1}) {
    const std::string& gate_value = node->inputs[side].name;
    const Node* sigmoid = graph.only_producer(node->inputs[1 - side].name, "Sigmoid", "");
    Node* gate = graph.producer(gate_value);
    if (sigmoid != nullptr && sigmoid->inputs[0].name == gate_value && is_projection(gate) &&
        graph.readers(gate_value) == 2) {
      return {gate, "swiglu"};
    }
  }
  return {};
}

}  // namespace

void gated_projection(Graph& graph, RepackedWeights& weights) {
  graph.each("Mul", "", [&](Node& node) {
    for (const int side : {0, 1}) {
      const Activated found = activated(graph, node.inputs[side].name);
      const Node* up = graph.only_producer(node.inputs[1 - side].name, "Q4NXMatMul", kDomain);
      if (found.gate == nullptr || !is_projection(up) ||
          up->inputs[0].name != found.gate->inputs[0].name ||
          up->required_integer("M") != found.gate->required_integer("M")) {
        continue;
      }
      std::optional<Value> weight = weights.join({found.gate, up});
      if (!weight) continue;
      // It stands where the product stood: after all that it reads.
      node.op_type = "Q4NXMatMul";
      node.domain = kDomain;
      node.since_version = 1;
      node.attributes = found.gate->attributes;
      node.attributes.insert_or_assign("gating", std::string(found.gating));
      node.inputs = {up->inputs[0], std::move(*weight)};
      graph.changed();
      return;
    }
  });
}

}  // namespace flownpu::lowering
