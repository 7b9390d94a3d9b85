// SPDX-License-Identifier: Apache-2.0
// Element by element, one float to one float: activations, roots, the error function.
#include <cmath>

#include "ops/cpu/broadcast.h"
#include "ops/cpu/elements.h"
#include "ops/cpu/step.h"

namespace flownpu::cpu {
namespace {

// Applies a function to each element.
class Unary final : public Step {
 public:
  using Function = float (*)(float);

  Unary(const Context& context, Function function) : context_(context), function_(function) {}

  std::optional<Slicing> slicing(const Node& node) const override { return slice_elements(node); }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    outputs[0] = inputs[0].shape;
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const auto* x = inputs[0].as<const float>();
    auto* y = outputs[0].as<float>();
    in_parallel(*context_.pool, inputs[0].shape.elements(), [&](auto begin, auto end) {
      for (std::int64_t i = begin; i < end; ++i) y[i] = function_(x[i]);
    });
  }

 private:
  Context context_;
  Function function_;
};

// GELU, with the instruction set's own exp.
class Gelu final : public Step {
 public:
  Gelu(const Node& node, const Context& context)
      : context_(context),
        activation_(node.text("approximate", "none") == "tanh" ? Activation::kGeluTanh
                                                               : Activation::kGelu) {}

  std::optional<Slicing> slicing(const Node& node) const override { return slice_elements(node); }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    outputs[0] = inputs[0].shape;
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    in_parallel(*context_.pool, inputs[0].shape.elements(), [&](auto begin, auto end) {
      context_.kernels.activate(inputs[0].as<const float>() + begin, activation_,
                                outputs[0].as<float>() + begin, end - begin);
    });
  }

 private:
  Context context_;
  Activation activation_;
};

template <Unary::Function FUNCTION>
std::unique_ptr<Step> make_unary(const Node& /*node*/, const Context& context) {
  return std::make_unique<Unary>(context, FUNCTION);
}

float sigmoid(float x) { return 1.0F / (1.0F + std::exp(-x)); }
float hyperbolic_tangent(float x) { return std::tanh(x); }
float exponential(float x) { return std::exp(x); }
float square_root(float x) { return std::sqrt(x); }
float reciprocal(float x) { return 1.0F / x; }
float negative(float x) { return -x; }
float error_function(float x) { return std::erf(x); }

constexpr Port kX[] = {{.name = "X", .types = kFloat}};
constexpr Port kY[] = {{.name = "Y", .types = kFloat}};
constexpr AttributeRule kGelu[] = {text("approximate", "none|tanh")};

constexpr Operator kOperators[] = {
    {{"", "Tanh", 6, 13, kX, kY}, make_unary<hyperbolic_tangent>},
    {{"", "Sigmoid", 6, 13, kX, kY}, make_unary<sigmoid>},
    {{"", "Exp", 6, 13, kX, kY}, make_unary<exponential>},
    {{"", "Sqrt", 6, 13, kX, kY}, make_unary<square_root>},
    {{"", "Reciprocal", 6, 13, kX, kY}, make_unary<reciprocal>},
    {{"", "Neg", 6, 13, kX, kY}, make_unary<negative>},
    {{"", "Erf", 9, 13, kX, kY}, make_unary<error_function>},
    {{"", "Gelu", 20, 20, kX, kY, kGelu}, make<Gelu>},
    {{"com.microsoft", "Gelu", 1, 1, kX, kY}, make<Gelu>},
};

}  // namespace

std::span<const Operator> elementwise_operators() { return kOperators; }

}  // namespace flownpu::cpu
