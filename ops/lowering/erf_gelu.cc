// SPDX-License-Identifier: Apache-2.0
// x / 2 (1 + Erf(x / sqrt 2)), as exporters write it, -> Gelu(x):
//
//   Mul(Mul(x, s), 0.5), Mul(Mul(x, 0.5), s) with s = Add(Erf(Div(x, sqrt 2)), 1)
//
// in any order of the operands, and with Mul(x, sqrt 1/2) for the Div. ONNX Runtime fuses these for
// its own provider only.
#include <cmath>
#include <numbers>
#include <string>

#include "ops/lowering/lowering.h"

namespace flownpu::lowering {
namespace {

// A node of two operands, of which one is a constant of one element; `other` is null if there is
// none.
struct WithNumber {
  float number = 0;
  const Value* other = nullptr;
};

WithNumber with_number(const Node& node) {
  for (const std::size_t side : {1, 0}) {
    const Value& value = node.inputs[side];
    if (value.constant == nullptr || value.type != DataType::kFloat32 || !value.shape ||
        value.shape->elements() != 1) {
      continue;
    }
    // Exporters write a scalar. [1] adds an axis only to a scalar x, which Gelu would not.
    if (value.shape->rank() > 1 || (node.op_type == "Div" && side == 0)) return {};
    return {*static_cast<const float*>(value.constant), &node.inputs[1 - side]};
  }
  return {};
}

bool is_near(float number, double expected) { return std::abs(number - expected) < 1e-5; }

// The x of s = Add(Erf(x / sqrt 2), 1); null if `value` is not such a sum.
const Value* argument(Graph& graph, const Value& value) {
  const Node* sum = graph.only_producer(value.name, "Add", "");
  if (sum == nullptr) return nullptr;
  const WithNumber one = with_number(*sum);
  if (one.other == nullptr || one.number != 1) return nullptr;
  const Node* erf = graph.only_producer(one.other->name, "Erf", "");
  if (erf == nullptr) return nullptr;
  const std::string& scaled = erf->inputs[0].name;
  const Node* division = graph.only_producer(scaled, "Div", "");
  const Node* product = graph.only_producer(scaled, "Mul", "");
  if (division == nullptr && product == nullptr) return nullptr;
  const WithNumber root = with_number(division != nullptr ? *division : *product);
  const double expected = division != nullptr ? std::numbers::sqrt2 : std::numbers::sqrt2 / 2;
  return root.other != nullptr && is_near(root.number, expected) ? root.other : nullptr;
}

// The x of Mul(x, s).
const Value* factor(Graph& graph, const Node& product) {
  for (const std::size_t side : {0, 1}) {
    const Value* x = argument(graph, product.inputs[side]);
    if (x != nullptr && x->name == product.inputs[1 - side].name) return x;
  }
  return nullptr;
}

// The x of a whole Gelu.
const Value* argument_of(Graph& graph, const Node& node) {
  const WithNumber half = with_number(node);
  if (half.other != nullptr) {
    const Node* product = graph.only_producer(half.other->name, "Mul", "");
    return product != nullptr && half.number == 0.5F ? factor(graph, *product) : nullptr;
  }
  for (const std::size_t side : {0, 1}) {
    const Node* halved = graph.only_producer(node.inputs[side].name, "Mul", "");
    if (halved == nullptr) continue;
    const WithNumber number = with_number(*halved);
    const Value* x = argument(graph, node.inputs[1 - side]);
    const bool is_half = number.other != nullptr && number.number == 0.5F;
    if (x != nullptr && is_half && number.other->name == x->name) return x;
  }
  return nullptr;
}

}  // namespace

void erf_gelu(Graph& graph) {
  graph.each("Mul", "", [&](Node& node) {
    const Value* found = argument_of(graph, node);
    if (found == nullptr || found->type != DataType::kFloat32) return;
    const Value x = *found;
    node.op_type = "Gelu";
    node.since_version = 20;  // the first ONNX version with Gelu
    node.attributes.clear();
    node.inputs = {x};
    graph.changed();
  });
}

}  // namespace flownpu::lowering
