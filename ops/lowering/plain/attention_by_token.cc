// SPDX-License-Identifier: Apache-2.0
// Attention between Transposes of heads and tokens, as it lies in memory before and behind them:
//
//   Transpose(Attention(Transpose(Q), Transpose(K), Transpose(V), mask))
//     -> Reshape(Attention(Reshape(Q), Reshape(K), Reshape(V), mask))
//
// with Q [B, S, H, d], which Attention also takes as [B, S, H d]. Its keys may have been transposed
// twice, and queries and keys multiplied by a number in between.
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "ops/lowering/lowering.h"

namespace flownpu::lowering {
namespace {

using Order = std::vector<std::int64_t>;

// [B, S, H, d] as [B, H, S, d], and back.
Order swapped() { return {0, 2, 1, 3}; }
constexpr std::size_t kFactors = 3;  // Q, K, V
constexpr std::size_t kMask = 3;

Value insert(Graph& graph, const Node& before, std::string_view op_type, const Value& x,
             const Value& y, const Shape& shape) {
  Node node;
  node.op_type = op_type;
  node.since_version = 14;
  node.inputs = {x, y};
  node.outputs = {{graph.unique_name(x.name + "_by_token"), x.type, shape}};
  node.name = node.outputs[0].name;
  Value output = node.outputs[0];
  graph.insert_before(before, std::move(node));
  return output;
}

// The value [B, S, H, d] that Transposes order like `x`; without a name if there is none. Numbers
// that multiply it in between multiply what is returned.
Value by_token(Graph& graph, const Node& before, const Value& x, const Order& order) {
  if (order == Order{0, 1, 2, 3}) return x;
  const Node* maker = graph.producer(x.name);
  if (maker == nullptr || !maker->domain.empty()) return {};
  const Value source = maker->inputs[0];
  if (maker->op_type == "Transpose") {
    const Order given = maker->integers("perm");
    if (given.size() != order.size()) return {};
    Order before_it(order.size());
    for (std::size_t axis = 0; axis < order.size(); ++axis)
      before_it[static_cast<std::size_t>(given[axis])] = order[axis];
    return by_token(graph, before, source, before_it);
  }
  if (maker->op_type != "Mul") return {};
  const Value number = maker->inputs[1];
  if (!number.shape || number.shape->rank() > 1 || number.shape->elements() != 1) return {};
  const Value tokens = by_token(graph, before, source, order);
  if (tokens.name.empty()) return {};
  return insert(graph, before, "Mul", tokens, number, tokens.shape.value_or(Shape()));
}

// A constant list of sizes for Reshape, which keeps the first two axes.
Value sizes_behind_tokens(Graph& graph, const std::vector<std::int64_t>& sizes) {
  auto list = std::make_shared<std::vector<std::int64_t>>(std::vector<std::int64_t>{0, 0});
  list->insert(list->end(), sizes.begin(), sizes.end());
  return {graph.unique_name("sizes_by_token"), DataType::kInt64,
          Shape{static_cast<std::int64_t>(list->size())}, list->data(), list};
}

// The tokens and heads of a value of 4 axes, of which H and d are known; nullptr if it is another.
const Shape* heads_of(const Value& value) {
  const bool has = value.shape && value.shape->rank() == 4 && value.type == DataType::kFloat32 &&
                   (*value.shape)[1] > 0 && (*value.shape)[3] > 0;
  return has ? &*value.shape : nullptr;
}

void join(Graph& graph, Node& transpose) {
  if (transpose.integers("perm") != swapped()) return;
  if (graph.readers(transpose.outputs[0].name) == 0) return;
  Node* attention = graph.only_producer(transpose.inputs[0].name, "Attention", "");
  if (attention == nullptr || attention->outputs.size() > 1) return;
  for (std::size_t i = kMask + 1; i < attention->inputs.size(); ++i)
    if (attention->input(i) != nullptr) return;  // with a cache
  std::array<Value, kFactors> tokens;
  std::array<Shape, kFactors> heads;
  for (std::size_t i = 0; i < kFactors; ++i) {
    const Shape* shape = heads_of(attention->inputs[i]);
    if (shape == nullptr) return;
    heads[i] = *shape;
    tokens[i] = by_token(graph, *attention, attention->inputs[i], swapped());
    if (tokens[i].name.empty()) return;
  }
  for (std::size_t i = 0; i < kFactors; ++i) {
    const std::int64_t width = heads[i][1] * heads[i][3];
    attention->inputs[i] =
        insert(graph, *attention, "Reshape", tokens[i], sizes_behind_tokens(graph, {width}),
               Shape{heads[i][0], heads[i][2], width});
  }
  attention->attributes["q_num_heads"] = heads[0][1];
  attention->attributes["kv_num_heads"] = heads[1][1];
  Value& result = attention->outputs[0];
  result.name = graph.unique_name(result.name + "_by_token");
  result.shape = Shape{heads[0][0], heads[0][2], heads[0][1] * heads[2][3]};
  transpose.op_type = "Reshape";
  transpose.since_version = 14;
  transpose.attributes.clear();
  transpose.inputs = {result, sizes_behind_tokens(graph, {heads[0][1], heads[2][3]})};
  graph.changed();
  graph.applied("attention_by_token");
}

}  // namespace

void attention_by_token(Graph& graph) {
  graph.each("Transpose", "", [&](Node& node) { join(graph, node); });
}

}  // namespace flownpu::lowering
