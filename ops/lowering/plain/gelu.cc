// SPDX-License-Identifier: Apache-2.0
// GELU in simple operators, as exporters write it, -> Gelu(x), exact or with tanh:
//
//   Mul(Mul(x, s), 0.5), Mul(Mul(x, 0.5), s), Mul(x, Mul(s, 0.5)) with
//   s = Add(Erf(Div(x, sqrt 2)), 1), or
//   s = Add(Tanh(Mul(Add(x, cube), sqrt(2 / pi))), 1), cube a product of 0.044715 and three x, or
//   of 0.044715 and Pow(x, 3)
//
// in any order of the operands, and with Mul(x, sqrt 1/2) for the Div. ONNX Runtime fuses these for
// its own provider only.
#include <algorithm>
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
    const Value& other = node->inputs[1 - side];
    const bool is_base = side == 0 && node->op_type != "Mul" && node->op_type != "Add";
    if (value.shape->rank() > std::max(1, other.shape.value_or(Shape()).rank()) || is_base)
      return {};
    return {*static_cast<const float*>(value.constant), &other};
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

  // The x of Add(x, 0.044715 times the cube of x).
  const Value* of_cubic(const Value& value) {
    const Node* added = only(value, "Add");
    for (const std::size_t side : {0, 1}) {
      if (added == nullptr) break;
      const Value& x = added->inputs[1 - side];
      const Monomial cube = monomial(added->inputs[side], x.name);
      if (cube.power == 3 && std::abs(cube.factor - kCubic) < 1e-5) return &x;
    }
    return nullptr;
  }

  // factor x^power; a power above 3 is of no such product.
  struct Monomial {
    double factor = 1;
    int power = 0;
  };

  // `depth`: how many products may follow one another; that of three x and a number has three.
  Monomial monomial(const Value& value, const std::string& x, int depth = 3) {
    constexpr Monomial kNone{0, 4};
    if (value.name == x) return {1, 1};
    if (const Value* base = beside(only(value, "Pow"), 3)) return {1, base->name == x ? 3 : 4};
    const Node* product = only(value, "Mul");
    if (product == nullptr || depth == 0) return kNone;
    if (const WithNumber found = with_number(product); found.other != nullptr) {
      const Monomial other = monomial(*found.other, x, depth - 1);
      return {found.number * other.factor, other.power};
    }
    const Monomial a = monomial(product->inputs[0], x, depth - 1);
    if (a.power > 3) return kNone;
    const Monomial b = monomial(product->inputs[1], x, depth - 1);
    return {a.factor * b.factor, a.power + b.power};
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
    graph.applied("gelu");
  });
}

}  // namespace flownpu::lowering
