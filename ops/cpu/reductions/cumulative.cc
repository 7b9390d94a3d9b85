// SPDX-License-Identifier: Apache-2.0
// CumSum: graphs number the tokens of pictures with it, and compute positions from a mask.
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>

#include "ops/cpu/elements.h"
#include "ops/cpu/integers.h"
#include "ops/cpu/step.h"

namespace flownpu::cpu {
namespace {

// y[i] = x[0] + .. + x[i] along an axis; exclusive: without x[i]; reverse: from the end.
class CumSum final : public Step {
 public:
  CumSum(const Node& node, const Context& /*context*/)
      : name_(to_string(node)),
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
    std::int64_t before = 1;
    std::int64_t after = 1;
    for (std::int64_t i = 0; i < axis; ++i) before *= shape[static_cast<int>(i)];
    for (std::int64_t i = axis + 1; i < shape.rank(); ++i) after *= shape[static_cast<int>(i)];
    with_number(inputs[0].type, [&]<typename T> {
      add_up(inputs[0].as<const T>(), outputs[0].as<T>(), before, shape[static_cast<int>(axis)],
             after);
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
    for (std::int64_t line = 0; line < before * after; ++line) {
      std::int64_t at = line / after * size * after + line % after;
      if (reverse_) at += (size - 1) * after;
      Total sum = 0;
      for (std::int64_t i = 0; i < size; ++i, at += step) {
        const Total next = sum + static_cast<Total>(x[at]);
        y[at] = static_cast<T>(exclusive_ ? sum : next);
        sum = next;
      }
    }
  }

  std::string name_;
  bool exclusive_;
  bool reverse_;
};

constexpr Port kInputs[] = {{.name = "x", .types = kNumbers, .type_letter = 'T'},
                            {.name = "axis", .types = kIntegers}};
constexpr Port kOutputs[] = {{.name = "y", .types = kNumbers, .type_letter = 'T'}};
constexpr AttributeRule kAttributes[] = {flag("exclusive"), flag("reverse")};

constexpr Operator kOperators[] = {
    {{"", "CumSum", 11, 14, kInputs, kOutputs, kAttributes}, make<CumSum>}};

}  // namespace

std::span<const Operator> cumulative_operators() { return kOperators; }

}  // namespace flownpu::cpu
