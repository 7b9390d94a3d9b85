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

namespace flownpu::lowering {
namespace {

bool is_constant(const Value& value) { return value.name.empty() || value.constant != nullptr; }

// Whether all of x has one scale and zero point, and all inputs are constants.
bool has_one_scale(const Node& node) {
  if (!std::ranges::all_of(node.inputs, is_constant)) return false;
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

std::int64_t integer_of(const Value& value, std::int64_t index) {
  switch (value.type) {
    case DataType::kInt8:
      return static_cast<const std::int8_t*>(value.constant)[index];
    case DataType::kUInt8:
      return static_cast<const std::uint8_t*>(value.constant)[index];
    default:
      return static_cast<const std::int32_t*>(value.constant)[index];
  }
}

// The result of a DequantizeLinear of constants; without a name where the node is another.
Value computed(Graph& graph, const Node& node) {
  const Value* x = node.input(0);
  const Value* scale = node.input(1);
  const Value* zero = node.input(2);
  // A constant of no elements has no memory, by which constants are known.
  if (!std::ranges::all_of(node.inputs, is_constant) || !x->shape || x->shape->elements() == 0 ||
      !scale->shape || node.integer("block_size", 0) != 0) {
    return {};
  }
  const std::int64_t groups = scale->shape->elements();
  const std::int64_t rank = x->shape->rank();
  const std::int64_t given = node.integer("axis", 1);
  const std::int64_t axis = given < 0 ? given + rank : given;
  // A node whose numbers do not fit is left to its step, which says so.
  const bool is_along = axis >= 0 && axis < rank && scale->shape->rank() == 1 &&
                        groups == (*x->shape)[static_cast<int>(axis)];
  const bool fits = zero == nullptr || (zero->shape && zero->shape->elements() == groups);
  if ((groups != 1 && !is_along) || !fits) return {};
  std::int64_t count = 1;
  for (std::int64_t i = groups == 1 ? 0 : axis + 1; i < rank; ++i)
    count *= (*x->shape)[static_cast<int>(i)];
  const auto values =
      std::make_shared<std::vector<float>>(static_cast<std::size_t>(x->shape->elements()));
  for (std::int64_t i = 0; i < x->shape->elements(); ++i) {
    const std::int64_t group = i / count % groups;
    const std::int64_t from = zero == nullptr ? 0 : integer_of(*zero, group);
    (*values)[static_cast<std::size_t>(i)] = static_cast<float>(integer_of(*x, i) - from) *
                                             static_cast<const float*>(scale->constant)[group];
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
