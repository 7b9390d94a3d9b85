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

// The operand that is no constant for each channel, and the constant; null where it is another.
struct ByChannel {
  const Value* x = nullptr;
  const Value* numbers = nullptr;
};
ByChannel by_channel(const Node* node, const Shape& shape) {
  if (node == nullptr) return {};
  for (const std::size_t side : {0, 1}) {
    if (is_by_channel(node->inputs[1 - side], shape))
      return {&node->inputs[side], &node->inputs[1 - side]};
  }
  return {};
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
  const Value& result = node.outputs[0];
  if (!result.shape || result.shape->rank() < 3 || (*result.shape)[1] <= 0) return;
  const Shape& shape = *result.shape;
  const ByChannel beta = by_channel(&node, shape);
  if (beta.x == nullptr) return;
  const ByChannel gamma = by_channel(graph.only_producer(beta.x->name, "Mul", ""), shape);
  if (gamma.x == nullptr) return;
  const Node* back = graph.only_producer(gamma.x->name, "Reshape", "");
  if (back == nullptr) return;
  const Node* norm = graph.only_producer(back->inputs[0].name, "InstanceNormalization", "");
  if (norm == nullptr) return;
  const Node* grouped = graph.only_producer(norm->inputs[0].name, "Reshape", "");
  if (grouped == nullptr) return;
  const Value& x = grouped->inputs[0];
  const std::vector<std::int64_t> sizes = constant_integers(grouped->input(1));
  const bool in_groups = sizes.size() == 3 && sizes[1] > 0 && sizes[2] == -1 &&
                         (sizes[0] == 0 || (x.shape && sizes[0] == (*x.shape)[0]));
  // The Reshape back has x's shape.
  const Node* sizes_of_x = graph.producer(back->inputs[1].name);
  const bool is_taken = sizes_of_x != nullptr && sizes_of_x->op_type == "Shape" &&
                        sizes_of_x->attributes.empty() && sizes_of_x->inputs[0].name == x.name;
  const bool is_known = x.shape && *x.shape == shape && std::ranges::all_of(shape, [](auto size) {
                          return size >= 0;
                        });
  const bool is_alike = x.shape && x.shape->rank() == shape.rank() && (*x.shape)[1] == shape[1] &&
                        (is_taken || is_known);
  if (!in_groups || !is_alike || shape[1] % sizes[1] != 0) {
    graph.missed("group_norm", node,
                 "expected Reshape to [0, groups, -1] and back to images of as many channels, got " +
                     text_of(sizes));
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
  if (node.number("alpha", 1) != 1) return;
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
