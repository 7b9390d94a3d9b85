// SPDX-License-Identifier: Apache-2.0
// CumSum: graphs number the tokens of pictures with it, and make positions of a mask.
#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>

#include "ops/cpu/elements.h"
#include "ops/cpu/integers.h"
#include "ops/cpu/rows.h"
#include "ops/cpu/step.h"
#include "ops/cpu/widened.h"

namespace flownpu::cpu {
namespace {

// y[i] = x[0] + .. + x[i] along an axis; exclusive: without x[i]; reverse: from the end.
class CumSum final : public Step {
 public:
  CumSum(const Node& node, const Context& context)
      : context_(context),
        name_(to_string(node)),
        exclusive_(node.integer("exclusive", 0) != 0),
        reverse_(node.integer("reverse", 0) != 0) {}

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    outputs[0] = inputs[0].shape;
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const Shape& shape = inputs[0].shape;
    if (inputs[1].shape.elements() != 1)
      fail("[", name_, "] expected one axis, got ", inputs[1].shape.elements());
    const std::int64_t axis = wrap(name_, integer_at(inputs[1], 0), shape.rank());
    with_number(inputs[0].type, [&]<typename T> {
      add_up(inputs[0].as<const T>(), outputs[0].as<T>(), elements_of(shape, 0, axis),
             shape[static_cast<int>(axis)], elements_of(shape, axis + 1, shape.rank()));
    });
  }

 private:
  // x and y [before][size][after]. Integers wrap around where they overflow. Floats are added up in
  // double. A sum of n is off by at most n 2^-53 of the sum of magnitudes, and by its rounding to
  // float. ONNX Runtime adds them in float one after the other, and may be off by n 2^-24.
  template <typename T>
  void add_up(const T* x, T* y, std::int64_t before, std::int64_t size, std::int64_t after) const {
    using Total = typename std::conditional_t<std::is_integral_v<T>, std::make_unsigned<T>,
                                              std::type_identity<double>>::type;
    const std::int64_t step = reverse_ ? -after : after;
    // Neighbouring lines are added up together, as many as a task has.
    constexpr std::int64_t kLines = 256;
    const std::int64_t blocks = (after + kLines - 1) / kLines;
    context_.pool->run(before * blocks, [&](std::int64_t task) {
      const std::int64_t column = task % blocks * kLines;
      const std::int64_t lines = std::min(kLines, after - column);
      std::int64_t at = task / blocks * size * after + column + (reverse_ ? (size - 1) * after : 0);
      std::array<Total, kLines> sums{};
      for (std::int64_t i = 0; i < size; ++i, at += step) {
        for (std::int64_t line = 0; line < lines; ++line) {
          const Total next = sums[line] + static_cast<Total>(x[at + line]);
          y[at + line] = static_cast<T>(exclusive_ ? sums[line] : next);
          sums[line] = next;
        }
      }
    });
  }

  Context context_;
  std::string name_;
  bool exclusive_;
  bool reverse_;
};

constexpr Port kInputs[] = {{.name = "x", .types = kNumbersAndFloats, .type_letter = 'T'},
                            {.name = "axis", .types = kIntegers}};
constexpr Port kOutputs[] = {{.name = "y", .types = kNumbersAndFloats, .type_letter = 'T'}};
constexpr AttributeRule kAttributes[] = {flag("exclusive"), flag("reverse")};

constexpr Operator kOperators[] = {
    {{"", "CumSum", 11, 14, kInputs, kOutputs, kAttributes}, widened<make<CumSum>>}};

}  // namespace

std::span<const Operator> cumulative_operators() { return kOperators; }

}  // namespace flownpu::cpu
