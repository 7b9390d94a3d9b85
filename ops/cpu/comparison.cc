// SPDX-License-Identifier: Apache-2.0
// Comparisons, which make masks, and the logic that joins them. A true element is 1, a false one 0.
#include <functional>

#include "ops/cpu/binary.h"
#include "ops/cpu/elements.h"

namespace flownpu::cpu {
namespace {

template <typename Function>
class Comparison final : public Binary {
 public:
  Comparison(const Node& node, const Context& context) : Binary(node, context) {
    check_number(node, 0);
    check_same_type(node, 0, 1);
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    with_number(inputs[0].type,
                [&]<typename T> { combine<T, bool>(context(), inputs, outputs[0], Function()); });
  }
};

// Of elements that are 0 or 1.
template <typename Function>
class Logic final : public Binary {
 public:
  Logic(const Node& node, const Context& context) : Binary(node, context) {
    check_type(node, 0, {DataType::kBool});
    check_type(node, 1, {DataType::kBool});
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    combine<std::uint8_t, std::uint8_t>(context(), inputs, outputs[0], Function());
  }
};

class Not final : public Step {
 public:
  Not(const Node& node, const Context& context) : context_(context) {
    check_type(node, 0, {DataType::kBool});
  }

  std::optional<Slicing> slicing(const Node& node) const override { return slice_elements(node); }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    outputs[0] = inputs[0].shape;
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const auto* x = inputs[0].as<const bool>();
    auto* y = outputs[0].as<bool>();
    in_parallel(*context_.pool, inputs[0].shape.elements(), [&](auto begin, auto end) {
      for (std::int64_t i = begin; i < end; ++i) y[i] = !x[i];
    });
  }

 private:
  Context context_;
};

std::unique_ptr<Step> make_equal(const Node& node, const Context& context) {
  const Value* a = node.input(0);
  const Value* b = node.input(1);
  const auto is_bool = [](const Value* value) {
    return value != nullptr && value->type == DataType::kBool;
  };
  if (is_bool(a) && is_bool(b))
    return std::make_unique<Logic<std::equal_to<std::uint8_t>>>(node, context);
  return std::make_unique<Comparison<std::equal_to<>>>(node, context);
}

constexpr Operator kOperators[] = {
    {"", "Equal", make_equal},
    {"", "Less", make<Comparison<std::less<>>>},
    {"", "LessOrEqual", make<Comparison<std::less_equal<>>>},
    {"", "Greater", make<Comparison<std::greater<>>>},
    {"", "GreaterOrEqual", make<Comparison<std::greater_equal<>>>},
    {"", "And", make<Logic<std::bit_and<std::uint8_t>>>},
    {"", "Or", make<Logic<std::bit_or<std::uint8_t>>>},
    {"", "Xor", make<Logic<std::bit_xor<std::uint8_t>>>},
    {"", "Not", make<Not>},
};

}  // namespace

std::span<const Operator> comparison_operators() { return kOperators; }

}  // namespace flownpu::cpu
