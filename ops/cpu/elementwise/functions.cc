// SPDX-License-Identifier: Apache-2.0
// Functions of one number, element by element: activations, roots, the error function.
#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <string>
#include <type_traits>

#include "ops/cpu/broadcast.h"
#include "ops/cpu/elements.h"
#include "ops/cpu/integers.h"
#include "ops/cpu/rows.h"
#include "ops/cpu/step.h"
#include "ops/cpu/widened.h"

namespace flownpu::cpu {
namespace {

class Apply final : public Step {
 public:
  Apply(const Context& context, Function function) : context_(context), function_(function) {}

  std::optional<Slicing> slicing(const Node& node) const override { return slice_elements(node); }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    outputs[0] = inputs[0].shape;
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    in_parallel(*context_.pool, inputs[0].shape.elements(), [&](auto begin, auto end) {
      with_number(inputs[0].type, [&]<typename T> {
        const T* x = inputs[0].as<const T>() + begin;
        T* y = outputs[0].as<T>() + begin;
        if constexpr (std::is_same_v<T, float>) {
          context_.kernels.apply(function_, x, y, end - begin);
        } else {
          std::transform(x, x + (end - begin), y, [this](T v) { return of_integer(v); });
        }
      });
    });
  }

 private:
  // Only these functions have contracts with integers. The lowest number stays as it is.
  template <typename T>
  T of_integer(T x) const {
    const auto negative = static_cast<T>(-static_cast<std::make_unsigned_t<T>>(x));
    if (function_ == Function::kNeg) return negative;
    if (function_ == Function::kAbs) return x < 0 ? negative : x;
    return std::max<T>(x, 0);  // kRelu
  }

  Context context_;
  Function function_;
};

// x sigmoid(alpha x).
class Swish final : public Step {
 public:
  Swish(const Node& node, const Context& context)
      : context_(context), alpha_(node.number("alpha", node.op_type == "QuickGelu" ? 1.702F : 1)) {}

  std::optional<Slicing> slicing(const Node& node) const override { return slice_elements(node); }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    outputs[0] = inputs[0].shape;
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const auto* x = inputs[0].as<const float>();
    auto* y = outputs[0].as<float>();
    in_parallel(*context_.pool, inputs[0].shape.elements(), [&](auto begin, auto end) {
      constexpr std::int64_t kBlock = 1024;
      std::array<float, kBlock> gate;
      for (std::int64_t i = begin; i < end; i += kBlock) {
        const std::int64_t count = std::min(kBlock, end - i);
        std::transform(x + i, x + i + count, gate.begin(), [this](float v) { return alpha_ * v; });
        context_.kernels.apply(Function::kSigmoid, gate.data(), gate.data(), count);
        std::transform(x + i, x + i + count, gate.begin(), y + i, std::multiplies<>());
      }
    });
  }

 private:
  Context context_;
  float alpha_;
};

// gelu(x + bias), with a bias for each element of x's last axis; FastGelu's may be absent.
class BiasGelu final : public Step {
 public:
  BiasGelu(const Node& node, const Context& context)
      : context_(context),
        name_(to_string(node)),
        function_(node.op_type == "FastGelu" ? Function::kGeluTanh : Function::kGelu) {}

  std::optional<Slicing> slicing(const Node& node) const override {
    return slice_rows(node, {0}, 1);
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const Shape& x = inputs[0].shape;
    if (is_given(inputs, 1) && (x.rank() == 0 || x[-1] != inputs[1].shape[0]))
      fail("[", name_, "] expected a bias of the width of ", to_string(x), ", got ",
           inputs[1].shape[0], " elements");
    outputs[0] = x;
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const auto* x = inputs[0].as<const float>();
    auto* y = outputs[0].as<float>();
    if (!is_given(inputs, 1)) {
      return in_parallel(*context_.pool, inputs[0].shape.elements(), [&](auto begin, auto end) {
        context_.kernels.apply(function_, x + begin, y + begin, end - begin);
      });
    }
    const Rows rows(name_, inputs[0].shape, -1);
    context_.pool->run_rows(rows.count, [&](std::int64_t row) {
      float* sum = y + row * rows.size;
      context_.kernels.add(x + row * rows.size, inputs[1].as<const float>(), sum, rows.size);
      context_.kernels.apply(function_, sum, sum, rows.size);
    });
  }

 private:
  Context context_;
  std::string name_;
  Function function_;
};

// Both limits are optional; NaN stays NaN.
class Clip final : public Step {
 public:
  Clip(const Node& node, const Context& context) : context_(context), name_(to_string(node)) {}

  std::optional<Slicing> slicing(const Node& node) const override { return slice_elements(node); }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    for (const std::size_t limit : {1, 2}) {
      if (is_given(inputs, limit) && inputs[limit].shape.elements() != 1)
        fail("[", name_, "] expected limits of one number, got ", to_string(inputs[limit].shape));
    }
    outputs[0] = inputs[0].shape;
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    with_number(inputs[0].type, [&]<typename T> {
      const auto limit = [&](std::size_t input, T otherwise) {
        return is_given(inputs, input) ? *inputs[input].as<const T>() : otherwise;
      };
      using Limits = std::numeric_limits<T>;
      const T low = limit(1, Limits::has_infinity ? -Limits::infinity() : Limits::lowest());
      const T high = limit(2, Limits::has_infinity ? Limits::infinity() : Limits::max());
      const T* x = inputs[0].as<const T>();
      T* y = outputs[0].as<T>();
      in_parallel(*context_.pool, inputs[0].shape.elements(), [&](auto begin, auto end) {
        for (std::int64_t i = begin; i < end; ++i) {
          const T raised = x[i] < low ? low : x[i];
          y[i] = raised > high ? high : raised;
        }
      });
    });
  }

 private:
  Context context_;
  std::string name_;
};

template <Function FUNCTION>
std::unique_ptr<Step> make_apply(const Node& /*node*/, const Context& context) {
  return std::make_unique<Apply>(context, FUNCTION);
}

std::unique_ptr<Step> make_gelu(const Node& node, const Context& context) {
  const bool is_tanh = node.text("approximate", "none") == "tanh";
  return std::make_unique<Apply>(context, is_tanh ? Function::kGeluTanh : Function::kGelu);
}

constexpr Port kX[] = {{.name = "X", .types = kFloats, .type_letter = 'T'}};
constexpr Port kY[] = {{.name = "Y", .types = kFloats, .type_letter = 'T'}};
constexpr Port kNumberX[] = {{.name = "X", .types = kNumbersAndFloats, .type_letter = 'T'}};
constexpr Port kNumberY[] = {{.name = "Y", .types = kNumbersAndFloats, .type_letter = 'T'}};
constexpr AttributeRule kGelu[] = {text("approximate", "none|tanh")};

constexpr Port kBiasGelu[] = {
    {.name = "A", .types = kFloats, .shape = "[..,N]", .type_letter = 'T'},
    {.name = "B", .types = kFloats, .shape = "[N]", .type_letter = 'T'}};
constexpr Port kFastGelu[] = {
    {.name = "X", .types = kFloats, .type_letter = 'T'},
    optional({.name = "bias", .types = kFloats, .shape = "[N]", .type_letter = 'T'})};
constexpr Port kClip[] = {{.name = "input", .types = kNumbersAndFloats, .type_letter = 'T'},
                          {.name = "min",
                           .types = kNumbersAndFloats,
                           .presence = Presence::kOptional,
                           .type_letter = 'T'},
                          {.name = "max",
                           .types = kNumbersAndFloats,
                           .presence = Presence::kOptional,
                           .type_letter = 'T'}};
constexpr AttributeRule kSwish[] = {number("alpha")};

constexpr Operator kOperators[] = {
    {{"", "Abs", 6, 13, kNumberX, kNumberY}, widened<make_apply<Function::kAbs>>},
    {{"com.microsoft", "BiasGelu", 1, 1, kBiasGelu, kY}, widened<make<BiasGelu>>},
    {{"", "Clip", 11, 13, kClip, kNumberY}, widened<make<Clip>>},
    {{"", "Cos", 7, 22, kX, kY}, widened<make_apply<Function::kCos>>},
    {{"", "Erf", 9, 13, kX, kY}, widened<make_apply<Function::kErf>>},
    {{"", "Exp", 6, 13, kX, kY}, widened<make_apply<Function::kExp>>},
    {{"com.microsoft", "FastGelu", 1, 1, kFastGelu, kY}, widened<make<BiasGelu>>},
    {{"", "Gelu", 20, 20, kX, kY, kGelu}, widened<make_gelu>},
    {{"com.microsoft", "Gelu", 1, 1, kX, kY}, widened<make_apply<Function::kGelu>>},
    {{"", "Log", 6, 13, kX, kY}, widened<make_apply<Function::kLog>>},
    {{"", "Neg", 6, 13, kNumberX, kNumberY}, widened<make_apply<Function::kNeg>>},
    {{"com.microsoft", "QuickGelu", 1, 1, kX, kY, kSwish}, widened<make<Swish>>},
    {{"", "Reciprocal", 6, 13, kX, kY}, widened<make_apply<Function::kReciprocal>>},
    {{"", "Relu", 6, 14, kNumberX, kNumberY}, widened<make_apply<Function::kRelu>>},
    {{"", "Sigmoid", 6, 13, kX, kY}, widened<make_apply<Function::kSigmoid>>},
    {{"", "Sin", 7, 22, kX, kY}, widened<make_apply<Function::kSin>>},
    {{"", "Sqrt", 6, 13, kX, kY}, widened<make_apply<Function::kSqrt>>},
    {{"", "Swish", 24, 24, kX, kY, kSwish}, widened<make<Swish>>},
    {{"", "Tanh", 6, 13, kX, kY}, widened<make_apply<Function::kTanh>>},
};

}  // namespace

std::span<const Operator> function_operators() { return kOperators; }

}  // namespace flownpu::cpu
