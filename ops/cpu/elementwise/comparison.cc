// SPDX-License-Identifier: Apache-2.0
// Comparisons and tests, which make masks, and the logic that joins them. A true element is 1, a
// false one 0.
#include <cmath>
#include <functional>

#include "ops/cpu/elements.h"
#include "ops/cpu/elementwise/binary.h"
#include "ops/cpu/widened.h"

namespace flownpu::cpu {
namespace {

template <typename Function>
class Comparison final : public Binary {
 public:
  using Binary::Binary;

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    with_number(inputs[0].type,
                [&]<typename T> { combine<T, bool>(context(), inputs, outputs[0], Function()); });
  }
};

// Logic and equality of booleans, whose bytes are 0 or 1.
template <typename Function>
class Logic final : public Binary {
 public:
  using Binary::Binary;

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    combine<std::uint8_t, std::uint8_t>(context(), inputs, outputs[0], Function());
  }
};

// A bool for each Element: Function()(element).
template <typename Element, typename Function>
class Test final : public Step {
 public:
  Test(const Node& /*node*/, const Context& context) : context_(context) {}

  std::optional<Slicing> slicing(const Node& node) const override { return slice_elements(node); }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    outputs[0] = inputs[0].shape;
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const auto* x = inputs[0].as<const Element>();
    auto* y = outputs[0].as<bool>();
    in_parallel(*context_.pool, inputs[0].shape.elements(), [&](auto begin, auto end) {
      for (std::int64_t i = begin; i < end; ++i) y[i] = Function()(x[i]);
    });
  }

 private:
  Context context_;
};

struct IsNaN {
  bool operator()(float x) const { return std::isnan(x); }
};

std::unique_ptr<Step> make_equal(const Node& node, const Context& context) {
  if (node.inputs[0].type == DataType::kBool)
    return std::make_unique<Logic<std::equal_to<std::uint8_t>>>(node, context);
  return std::make_unique<Comparison<std::equal_to<>>>(node, context);
}

constexpr Types kNumbersAndBool{DataType::kFloat32, DataType::kFloat16, DataType::kBFloat16,
                                DataType::kInt64,   DataType::kInt32,   DataType::kBool};
constexpr Port kEqual[] = {{.name = "A", .types = kNumbersAndBool, .type_letter = 'T'},
                           {.name = "B", .types = kNumbersAndBool, .type_letter = 'T'}};
constexpr Port kTwoNumbers[] = {{.name = "A", .types = kNumbersAndFloats, .type_letter = 'T'},
                                {.name = "B", .types = kNumbersAndFloats, .type_letter = 'T'}};
constexpr Port kTwoBools[] = {{.name = "A", .types = kBool}, {.name = "B", .types = kBool}};
constexpr Port kOneBool[] = {{.name = "X", .types = kBool}};
constexpr Port kOneFloat[] = {{.name = "X", .types = kFloats, .type_letter = 'T'}};
constexpr Port kResult[] = {{.name = "C", .types = kBool}};
constexpr Port kTruth[] = {{.name = "Y", .types = kBool}};

constexpr Operator kOperators[] = {
    {{"", "Equal", 7, 19, kEqual, kResult}, widened<make_equal>},
    {{"", "Less", 7, 13, kTwoNumbers, kResult}, widened<make<Comparison<std::less<>>>>},
    {{"", "LessOrEqual", 12, 16, kTwoNumbers, kResult},
     widened<make<Comparison<std::less_equal<>>>>},
    {{"", "Greater", 7, 13, kTwoNumbers, kResult}, widened<make<Comparison<std::greater<>>>>},
    {{"", "GreaterOrEqual", 12, 16, kTwoNumbers, kResult},
     widened<make<Comparison<std::greater_equal<>>>>},
    {{"", "And", 7, 7, kTwoBools, kResult}, make<Logic<std::bit_and<std::uint8_t>>>},
    {{"", "Or", 7, 7, kTwoBools, kResult}, make<Logic<std::bit_or<std::uint8_t>>>},
    {{"", "Xor", 7, 7, kTwoBools, kResult}, make<Logic<std::bit_xor<std::uint8_t>>>},
    {{"", "Not", 1, 1, kOneBool, kTruth}, make<Test<bool, std::logical_not<>>>},
    {{"", "IsNaN", 9, 20, kOneFloat, kTruth}, widened<make<Test<float, IsNaN>>>},
};

}  // namespace

std::span<const Operator> comparison_operators() { return kOperators; }

}  // namespace flownpu::cpu
