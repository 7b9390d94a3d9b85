// SPDX-License-Identifier: Apache-2.0
// Gate and up projection of the same input become one product, whose epilogue joins them:
//
//   act(Q4NXMatMul(X, Wg)) * Q4NXMatMul(X, Wu) -> Q4NXMatMul(X, [Wg; Wu]; gating)
//
// gating = "geglu" for act = GELU with the tanh approximation, "swiglu" for act(g) = g sigmoid(g).
// Each weight is padded to whole blocks of 32 rows, so the number of rows is arbitrary.
#include <string>
#include <utility>

#include "ops/lowering/lowering.h"
#include "ops/nodes/q4nx_matmul.h"

namespace flownpu::lowering {
namespace {

// The activation of a gate, and the gate's projection.
struct Activated {
  const Node* activation = nullptr;
  const Node* gate = nullptr;
  const char* gating = nullptr;
  // Whether no other node reads the values between the gate's projection and the Mul.
  bool alone = false;
};

Activated activated(Graph& graph, const std::string& value) {
  const Node* node = graph.producer(value);
  if (node == nullptr) return {};
  const bool gelu = node->op_type == "Gelu" && node->domain.empty();
  if (gelu || (node->op_type == "FastGelu" && node->domain == "com.microsoft" &&
               node->input(1) == nullptr)) {
    const std::string& gate_value = node->inputs[0].name;
    const Node* gate = graph.producer(gate_value, "Q4NXMatMul", kDomain);
    return {node, gate, "geglu", graph.readers(value) == 1 && graph.readers(gate_value) == 1};
  }
  if (node->op_type != "Mul" || !node->domain.empty()) return {};
  for (const int side : {0, 1}) {
    const std::string& gate_value = node->inputs[side].name;
    const Node* sigmoid = graph.producer(node->inputs[1 - side].name, "Sigmoid", "");
    const Node* gate = graph.producer(gate_value, "Q4NXMatMul", kDomain);
    if (sigmoid == nullptr || gate == nullptr || sigmoid->inputs[0].name != gate_value) continue;
    return {node, gate, "swiglu",
            graph.readers(value) == 1 && graph.readers(gate_value) == 2 &&
                graph.readers(sigmoid->outputs[0].name) == 1};
  }
  return {};
}

// Why gate and up cannot become one product; empty if they can.
std::string obstacle_of(Graph& graph, const RepackedWeights& weights, const Activated& found,
                        const Node& up) {
  const Node& activation = *found.activation;
  if (activation.op_type == "Gelu" && activation.text("approximate", "none") != "tanh")
    return "GELU without the tanh approximation: gating knows geglu (tanh) and swiglu";
  for (const Node* projection : {found.gate, &up}) {
    if (std::string reason = epilogue_of(*projection, false); !reason.empty()) return reason;
  }
  const std::int64_t gate_rows = found.gate->required_integer("M");
  const std::int64_t up_rows = up.required_integer("M");
  if (gate_rows != up_rows) {
    return "gate and up have " + std::to_string(gate_rows) + " and " + std::to_string(up_rows) +
           " rows, expected as many";
  }
  if (up.inputs[kProductX].name != found.gate->inputs[kProductX].name)
    return "gate and up are products of different values, expected one that both read";
  if (!found.alone || graph.readers(up.outputs[0].name) != 1)
    return "something else reads gate, up or the activation";
  return weights.join_obstacle({found.gate, &up});
}

}  // namespace

void gated_projection(Graph& graph, RepackedWeights& weights) {
  graph.each("Mul", "", [&](Node& node) {
    for (const int side : {0, 1}) {
      const Activated found = activated(graph, node.inputs[side].name);
      const Node* up = graph.producer(node.inputs[1 - side].name, "Q4NXMatMul", kDomain);
      if (found.gate == nullptr || up == nullptr) continue;
      if (std::string reason = obstacle_of(graph, weights, found, *up); !reason.empty())
        return graph.missed("gated_projection", node, std::move(reason));
      // The new product takes the place of the Mul, which comes after all inputs of the product.
      node.name = found.gate->name;
      node.op_type = "Q4NXMatMul";
      node.domain = kDomain;
      node.since_version = 1;
      node.attributes = found.gate->attributes;
      node.attributes.insert_or_assign("gating", std::string(found.gating));
      Value weight = weights.join({found.gate, up}, "gate_up_proj.weight");
      node.inputs = {up->inputs[kProductX], std::move(weight)};
      graph.applied("gated_projection");
      graph.changed();
      return;
    }
  });
}

}  // namespace flownpu::lowering
