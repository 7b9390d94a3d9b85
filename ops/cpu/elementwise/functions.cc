// SPDX-License-Identifier: Apache-2.0
// Functions of one number, element by element: activations, roots, the error function.
#include <algorithm>
#include <type_traits>

#include "ops/cpu/broadcast.h"
#include "ops/cpu/elements.h"
#include "ops/cpu/step.h"

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

template <Function FUNCTION>
std::unique_ptr<Step> make_apply(const Node& /*node*/, const Context& context) {
  return std::make_unique<Apply>(context, FUNCTION);
}

std::unique_ptr<Step> make_gelu(const Node& node, const Context& context) {
  const bool is_tanh = node.text("approximate", "none") == "tanh";
  return std::make_unique<Apply>(context, is_tanh ? Function::kGeluTanh : Function::kGelu);
}

constexpr Port kX[] = {{.name = "X", .types = kFloat}};
constexpr Port kY[] = {{.name = "Y", .types = kFloat}};
constexpr Port kNumberX[] = {{.name = "X", .types = kNumbers, .type_letter = 'T'}};
constexpr Port kNumberY[] = {{.name = "Y", .types = kNumbers, .type_letter = 'T'}};
constexpr AttributeRule kGelu[] = {text("approximate", "none|tanh")};

constexpr Operator kOperators[] = {
    {{"", "Abs", 6, 13, kNumberX, kNumberY}, make_apply<Function::kAbs>},
    {{"", "Cos", 7, 22, kX, kY}, make_apply<Function::kCos>},
    {{"", "Erf", 9, 13, kX, kY}, make_apply<Function::kErf>},
    {{"", "Exp", 6, 13, kX, kY}, make_apply<Function::kExp>},
    {{"", "Gelu", 20, 20, kX, kY, kGelu}, make_gelu},
    {{"com.microsoft", "Gelu", 1, 1, kX, kY}, make_apply<Function::kGelu>},
    {{"", "Log", 6, 13, kX, kY}, make_apply<Function::kLog>},
    {{"", "Neg", 6, 13, kNumberX, kNumberY}, make_apply<Function::kNeg>},
    {{"", "Reciprocal", 6, 13, kX, kY}, make_apply<Function::kReciprocal>},
    {{"", "Relu", 6, 14, kNumberX, kNumberY}, make_apply<Function::kRelu>},
    {{"", "Sigmoid", 6, 13, kX, kY}, make_apply<Function::kSigmoid>},
    {{"", "Sin", 7, 22, kX, kY}, make_apply<Function::kSin>},
    {{"", "Sqrt", 6, 13, kX, kY}, make_apply<Function::kSqrt>},
    {{"", "Tanh", 6, 13, kX, kY}, make_apply<Function::kTanh>},
};

}  // namespace

std::span<const Operator> function_operators() { return kOperators; }

}  // namespace flownpu::cpu
