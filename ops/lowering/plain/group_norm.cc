// SPDX-License-Identifier: Apache-2.0
// The norm of groups of channels, and what follows it, -> ONNX Runtime's GroupNorm:
//
//   Add(Mul(Reshape(InstanceNormalization(Reshape(x, [0, G, -1]), 1, 0), ..), gamma), beta),
//   with gamma and beta [C, 1, ..]           -> GroupNorm(x, gamma, beta; groups = G)
//   GroupNormalization(x, gamma, beta)       -> GroupNorm, if Swish is the only one to read it
//   Swish(GroupNorm(..))                     -> GroupNorm(..; activation = 1)
#include <algorithm>

#include "ops/lowering/lowering.h"

namespace flownpu::lowering {
namespace {

bool is_constant_of(const Value& value, float number) {
  if (value.constant == nullptr || !value.shape || value.type != DataType::kFloat32) return false;
  const auto* numbers = static_cast<const float*>(value.constant);
  return std::all_of(numbers, numbers + value.shape->elements(),
                     [number](float x) { return x == number; });
}

// A constant number for each channel of x, [C, 1, ..] or [1, C, 1, ..].
bool is_by_channel(const Value& value, const Shape& x) {
  if (value.constant == nullptr || !value.shape || value.shape->elements() != x[1]) return false;
  const int pixels = x.rank() - 2;
  return value.shape->rank() > pixels && value.shape->rank() <= x.rank() &&
         (*value.shape)[-1 - pixels] == x[1];
}

// An operand, and a constant beside it; null where there is none.
struct WithConstant {
  const Value* x = nullptr;
  const Value* numbers = nullptr;
};
WithConstant with_constant(const Node* node) {
  if (node == nullptr) return {};
  for (const std::size_t side : {0, 1}) {
    if (node->inputs[1 - side].constant != nullptr)
      return {&node->inputs[side], &node->inputs[1 - side]};
  }
  return {};
}

// Whether `sizes` is the shape of x.
bool is_shape_of(const Node* sizes, const Value& x) {
  return sizes != nullptr && sizes->op_type == "Shape" && sizes->integer("start", 0) == 0 &&
         !sizes->attributes.contains("end") && sizes->inputs[0].name == x.name;
}

void become_group_norm(Node& node, std::vector<Value> inputs, std::int64_t groups, float epsilon) {
  node.op_type = "GroupNorm";
  node.domain = "com.microsoft";
  node.since_version = 1;
  node.attributes = {{"activation", std::int64_t{0}},
                     {"channels_last", std::int64_t{0}},
                     {"groups", groups},
                     {"epsilon", epsilon}};
  node.inputs = std::move(inputs);
}

// `node` is the last Add.
void by_instances(Graph& graph, Node& node) {
  const WithConstant beta = with_constant(&node);
  if (beta.x == nullptr) return;
  const WithConstant gamma = with_constant(graph.only_producer(beta.x->name, "Mul", ""));
  if (gamma.x == nullptr) return;
  const Node* back = graph.only_producer(gamma.x->name, "Reshape", "");
  if (back == nullptr) return;
  const Node* norm = graph.only_producer(back->inputs[0].name, "InstanceNormalization", "");
  if (norm == nullptr) return;
  const Node* grouped = graph.only_producer(norm->inputs[0].name, "Reshape", "");
  if (grouped == nullptr) return;
  const Value& x = grouped->inputs[0];
  if (!x.shape || x.shape->rank() < 3 || !is_by_channel(*gamma.numbers, *x.shape) ||
      !is_by_channel(*beta.numbers, *x.shape)) {
    return;
  }
  const std::vector<std::int64_t> sizes = constant_integers(grouped->input(1));
  const bool in_groups = sizes.size() == 3 && sizes[1] > 0 && sizes[2] == -1 &&
                         (sizes[0] == 0 || sizes[0] == (*x.shape)[0]) &&
                         (*x.shape)[1] % sizes[1] == 0;
  const bool is_known = std::ranges::all_of(*x.shape, [](auto size) { return size >= 0; }) &&
                        back->outputs[0].shape == x.shape;
  if (!in_groups || (!is_known && !is_shape_of(graph.producer(back->inputs[1].name), x))) {
    graph.missed(
        "group_norm", node,
        "expected Reshape to [0, groups, -1] and back to the images' shape, got " + text_of(sizes));
    return;
  }
  if (!is_constant_of(norm->inputs[1], 1) || !is_constant_of(norm->inputs[2], 0)) {
    graph.missed("group_norm", node, "expected an InstanceNormalization of scale 1 and bias 0");
    return;
  }
  const std::vector<Value> inputs{x, *gamma.numbers, *beta.numbers};
  become_group_norm(node, inputs, sizes[1], norm->number("epsilon", 1e-5F));
  graph.changed();
  graph.applied("group_norm");
}

void activate(Graph& graph, Node& node) {
  // GroupNorm does not take bfloat16.
  if (node.number("alpha", 1) != 1 || node.inputs[0].type == DataType::kBFloat16) return;
  const std::string source = node.inputs[0].name;
  const Node* norm = graph.only_producer(source, "GroupNormalization", "");
  if (norm != nullptr) {
    become_group_norm(node, norm->inputs, norm->required_integer("num_groups"),
                      norm->number("epsilon", 1e-5F));
  } else {
    norm = graph.only_producer(source, "GroupNorm", "com.microsoft");
    if (norm == nullptr || norm->integer("activation", 0) != 0 ||
        norm->integer("channels_last", 0) != 0) {
      return;
    }
    become_group_norm(node, norm->inputs, norm->required_integer("groups"),
                      norm->number("epsilon", 1e-5F));
  }
  node.attributes.insert_or_assign("activation", std::int64_t{1});
  graph.changed();
  graph.applied("group_norm");
}

}  // namespace

void group_norm(Graph& graph) {
  graph.each("Add", "", [&](Node& node) { by_instances(graph, node); });
  graph.each("Swish", "", [&](Node& node) { activate(graph, node); });
}

}  // namespace flownpu::lowering
