// SPDX-License-Identifier: Apache-2.0
// DequantizeLinear of constants that no product took, which would be computed in each run:
//
//   Gather(DequantizeLinear(table, scale, zero), ids)  -> DequantizeLinear(Gather(table, ids), ..),
//                                                      one scale, along the first axis
//   DequantizeLinear(constant, scale, zero)            -> the constant in f32
#include <algorithm>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "ops/lowering/lowering.h"
#include "ops/nodes/quantization.h"

namespace flownpu::lowering {
namespace {

bool is_constant(const Value& value) { return value.name.empty() || value.constant != nullptr; }

// Whether all of x has one scale and zero point, all inputs are constants, and rows of x can be
// gathered.
bool has_one_scale(const Node& node) {
  if (!std::ranges::all_of(node.inputs, is_constant) || is_packed(node.inputs[0].type))
    return false;
  const Value* scale = node.input(1);
  return scale->shape && scale->shape->elements() == 1 && node.integer("block_size", 0) == 0;
}

// Gathers rows of the table before they are dequantised.
void gather(Graph& graph, Node& node) {
  const Node* made = graph.producer(node.inputs[0].name, "DequantizeLinear", "");
  if (made == nullptr || !has_one_scale(*made) || node.integer("axis", 0) != 0) return;
  const Value rows{graph.unique_name(node.outputs[0].name + "_quantised"), made->inputs[0].type,
                   node.outputs[0].shape};
  Node gathered = node;
  gathered.inputs[0] = made->inputs[0];
  gathered.outputs[0] = rows;
  node.op_type = made->op_type;
  node.since_version = made->since_version;
  node.attributes = made->attributes;
  node.inputs = made->inputs;
  node.inputs[0] = rows;
  graph.insert_before(node, std::move(gathered));
}

// The result of a DequantizeLinear of constants; without a name where the node is another.
Value computed(Graph& graph, const Node& node) {
  const Value* x = node.input(0);
  const Value* scale = node.input(1);
  const Value* zero = node.input(2);
  // A constant of no elements has no memory, by which constants are known.
  if (!std::ranges::all_of(node.inputs, is_constant) || !x->shape || x->shape->elements() == 0 ||
      !scale->shape) {
    return {};
  }
  // A node whose numbers do not fit is left to its step, which says so.
  const auto scales =
      Scales::of(*x->shape, *scale->shape, node.integer("axis", 1), node.integer("block_size", 0));
  if (!scales ||
      (zero != nullptr && (!zero->shape || zero->shape->elements() != scale->shape->elements()))) {
    return {};
  }
  const auto values =
      std::make_shared<std::vector<float>>(static_cast<std::size_t>(x->shape->elements()));
  for (std::int64_t i = 0; i < x->shape->elements(); ++i) {
    const std::int64_t at = scales->index(i);
    const int from = zero == nullptr ? 0 : code_at(zero->type, zero->constant, at);
    (*values)[static_cast<std::size_t>(i)] =
        static_cast<float>(std::int64_t{code_at(x->type, x->constant, i)} - from) *
        static_cast<const float*>(scale->constant)[at];
  }
  return {graph.unique_name(node.outputs[0].name + "_constant"), DataType::kFloat32, x->shape,
          values->data(), values};
}

}  // namespace

void dequantized(Graph& graph) {
  graph.each("Gather", "", [&](Node& node) { gather(graph, node); });
  std::unordered_map<std::string, Value> constants;
  graph.each("DequantizeLinear", "", [&](Node& node) {
    if (graph.readers(node.outputs[0].name) == 0) return;
    const Value value = computed(graph, node);
    if (!value.name.empty()) constants.emplace(node.outputs[0].name, value);
  });
  graph.replace(constants);
}

}  // namespace flownpu::lowering
