// SPDX-License-Identifier: Apache-2.0
// GELU in simple operators, as exporters write it, -> Gelu(x), exact or with tanh:
//
//   Mul(Mul(x, s), 0.5), Mul(Mul(x, 0.5), s), Mul(x, Mul(s, 0.5)) with
//   s = Add(Erf(Div(x, sqrt 2)), 1), or
//   s = Add(Tanh(Mul(Add(x, Mul(cube, 0.044715)), sqrt(2 / pi))), 1), cube = Mul(Mul(x, x), x) or
//   Pow(x, 3)
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

WithNumber with_number(const Node* node) {
  if (node == nullptr) return {};
  for (const std::size_t side : {1, 0}) {
    const Value& value = node->inputs[side];
    if (value.constant == nullptr || value.type != DataType::kFloat32 || !value.shape ||
        value.shape->elements() != 1) {
      continue;
    }
    // Exporters write a scalar. [1] adds an axis only to a scalar x, which Gelu would not.
    const bool is_base = side == 0 && node->op_type != "Mul" && node->op_type != "Add";
    if (value.shape->rank() > 1 || is_base) return {};
    return {*static_cast<const float*>(value.constant), &node->inputs[1 - side]};
  }
  return {};
}

// The other operand, if the node's number is this one; else null.
const Value* beside(const Node* node, double number) {
  const WithNumber found = with_number(node);
  return found.other != nullptr && std::abs(found.number - number) < 1e-5 ? found.other : nullptr;
}

struct Argument {
  const Value* x = nullptr;
  bool by_tanh = false;
};

class Gelu {
 public:
  explicit Gelu(Graph& graph) : graph_(graph) {}

  // The x of a whole GELU, of which `node` is the last Mul; null if it is none.
  Argument of(const Node& node) {
    if (const Value* product = beside(&node, kHalf); product != nullptr) return factor(*product);
    for (const std::size_t side : {0, 1}) {
      const Value& one = node.inputs[side];
      const Value& other = node.inputs[1 - side];
      const Value* halved = beside(only(one, "Mul"), kHalf);
      if (halved == nullptr) continue;
      if (const Argument found = sum(other); is(found, *halved)) return found;
      if (const Argument found = sum(*halved); is(found, other)) return found;
    }
    return {};
  }

 private:
  static constexpr double kHalf = 0.5;
  static constexpr double kCubic = 0.044715;

  const Node* only(const Value& value, std::string_view op_type) {
    return graph_.only_producer(value.name, op_type, "");
  }
  static bool is(const Argument& found, const Value& x) {
    return found.x != nullptr && found.x->name == x.name;
  }

  // The x of Mul(x, s).
  Argument factor(const Value& value) {
    const Node* product = only(value, "Mul");
    for (const std::size_t side : {0, 1}) {
      if (product == nullptr) break;
      const Argument found = sum(product->inputs[side]);
      if (is(found, product->inputs[1 - side])) return found;
    }
    return {};
  }

  // The x of s.
  Argument sum(const Value& value) {
    const Value* function = beside(only(value, "Add"), 1);
    if (function == nullptr) return {};
    if (const Node* erf = only(*function, "Erf"); erf != nullptr) {
      const Value* x = beside(only(erf->inputs[0], "Div"), std::numbers::sqrt2);
      return {x != nullptr ? x : beside(only(erf->inputs[0], "Mul"), std::numbers::sqrt2 / 2)};
    }
    const Node* tanh = only(*function, "Tanh");
    if (tanh == nullptr) return {};
    const Value* cubic =
        beside(only(tanh->inputs[0], "Mul"), std::numbers::sqrt2 * std::numbers::inv_sqrtpi);
    return {cubic == nullptr ? nullptr : of_cubic(*cubic), true};
  }

  // The x of Add(x, Mul(cube of x, 0.044715)).
  const Value* of_cubic(const Value& value) {
    const Node* added = only(value, "Add");
    for (const std::size_t side : {0, 1}) {
      if (added == nullptr) break;
      const Value& x = added->inputs[1 - side];
      const Value* cube = beside(only(added->inputs[side], "Mul"), kCubic);
      if (cube != nullptr && is_cube(*cube, x.name)) return &x;
    }
    return nullptr;
  }

  bool is_cube(const Value& value, const std::string& x) {
    constexpr double kThree = 3;
    const Value* base = beside(only(value, "Pow"), kThree);
    if (base != nullptr) return base->name == x;
    const Node* product = only(value, "Mul");
    for (const std::size_t side : {0, 1}) {
      if (product == nullptr || product->inputs[1 - side].name != x) continue;
      const Node* square = only(product->inputs[side], "Mul");
      if (square != nullptr && square->inputs[0].name == x && square->inputs[1].name == x)
        return true;
    }
    return false;
  }

  Graph& graph_;
};

}  // namespace

void gelu(Graph& graph) {
  graph.each("Mul", "", [&](Node& node) {
    const Argument found = Gelu(graph).of(node);
    if (found.x == nullptr || found.x->type != DataType::kFloat32) return;
    const Value x = *found.x;
    node.op_type = "Gelu";
    node.since_version = 20;  // the first ONNX version with Gelu
    node.attributes = {{"approximate", std::string(found.by_tanh ? "tanh" : "none")}};
    node.inputs = {x};
    graph.changed();
  });
}

}  // namespace flownpu::lowering
