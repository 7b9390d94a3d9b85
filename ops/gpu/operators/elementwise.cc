// SPDX-License-Identifier: Apache-2.0
// Functions of one number, and arithmetic of two that broadcast.
#include <algorithm>
#include <string>

#include "ops/error.h"
#include "ops/gpu/operators/views.h"

namespace flownpu::gpu {
namespace {

struct Code {
  std::string_view op_type;
  const char* code;  // of a, and for two operands b
};
constexpr Code kCodes[] = {{"Abs", "fabs(a)"},
                           {"Add", "a + b"},
                           {"Cos", "cos(a)"},
                           {"Div", "a / b"},
                           {"Erf", "erf(a)"},
                           {"Exp", "exp(a)"},
                           {"Gelu", "0.5f * a * (1.0f + erf(0.70710678f * a))"},  // sqrt(1 / 2)
                           {"Log", "log(a)"},
                           {"Mul", "a * b"},
                           {"Neg", "-a"},
                           {"Pow", "pow(a, b)"},
                           {"QuickGelu", "a / (1.0f + exp(-args.alpha * a))"},
                           {"Reciprocal", "1.0f / a"},
                           {"Relu", "a < 0.0f ? 0.0f : a"},
                           {"Sigmoid", "1.0f / (1.0f + exp(-a))"},
                           {"Sin", "sin(a)"},
                           {"Sqrt", "sqrt(a)"},
                           {"Sub", "a - b"},
                           {"Swish", "a / (1.0f + exp(-args.alpha * a))"},
                           {"Tanh", "tanh(a)"}};
// sqrt(2 / pi) = 0.79788456
constexpr const char* kGeluTanh =
    "0.5f * a * (1.0f + tanh(0.79788456f * (a + 0.044715f * a * a * a)))";

std::string code_of(const Node& node) {
  if (node.text("approximate", "none") == "tanh") return kGeluTanh;
  const auto* found = std::ranges::find(kCodes, node.op_type, &Code::op_type);
  if (found == std::end(kCodes)) fail("[", to_string(node), "] expected a function");
  return found->code;
}

class Elementwise final : public ViewStep {
 public:
  Elementwise(const Node& node, StepArguments arguments)
      : ViewStep(node, std::move(arguments), code_of(node), node.inputs.size(),
                 node.number("alpha", node.op_type == "QuickGelu" ? 1.702F : 1.0F)) {}

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const Shape& sizes = outputs[0].shape;
    if (sizes.elements() == 0) return;
    Run run(context());
    const Buffer* y = run.output(outputs[0]);
    std::vector<Operand> operands;
    operands.reserve(inputs.size());
    for (std::size_t i = 0; i < inputs.size(); ++i)
      operands.emplace_back(at(run, inputs, i), broadcast(inputs[i].shape, sizes));
    walk(run, sizes, operands, {y, view_of(sizes)});
    run.read(y, outputs[0]);
  }

 private:
  static View broadcast(const Shape& from, const Shape& to) {
    const View own = view_of(from);
    View view;
    const int front = to.rank() - from.rank();
    for (int axis = 0; axis < from.rank(); ++axis) {
      if (from[axis] > 1)
        view.steps[static_cast<std::size_t>(front) + static_cast<std::size_t>(axis)] =
            own.steps[static_cast<std::size_t>(axis)];
    }
    return view;
  }
};

}  // namespace

std::unique_ptr<Step> make_elementwise(const Node& node, StepArguments arguments) {
  return std::make_unique<Elementwise>(node, std::move(arguments));
}

}  // namespace flownpu::gpu
