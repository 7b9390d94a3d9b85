// SPDX-License-Identifier: Apache-2.0
// ONNX's If between constants: a condition that each run computes chooses each output from two
// tensors of the model. GenAI's exports choose the tables of LongRoPE, of up to 50 MB, in this way.
#include <cstring>

#include "ops/cpu/elements.h"
#include "ops/cpu/step.h"
#include "ops/error.h"

namespace flownpu::cpu {
namespace {

class If final : public Step {
 public:
  If(const Node& node, const Context& /*context*/)
      : name_(to_string(node)), outputs_(node.outputs.size()) {
    if (node.inputs.size() != 1 + 2 * outputs_)
      fail("[", name_, "] expected branches of ", outputs_, " constants each, got ",
           node.inputs.size() - 1, " in both");
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    if (inputs[0].shape.elements() != 1)
      fail("[", name_, "] expected a condition of one element, got ", to_string(inputs[0].shape));
    for (std::size_t i = 0; i < outputs_; ++i) outputs[i] = inputs[chosen(i, inputs)].shape;
  }

  std::optional<std::size_t> same_as(std::size_t output,
                                     std::span<const Tensor> inputs) const override {
    return chosen(output, inputs);
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    for (std::size_t i = 0; i < outputs_; ++i) {
      const Tensor& from = inputs[chosen(i, inputs)];
      if (!outputs[i].present() || outputs[i].data == from.data || from.bytes() == 0) continue;
      std::memcpy(outputs[i].data, from.data, from.bytes());
    }
  }

 private:
  std::size_t chosen(std::size_t output, std::span<const Tensor> inputs) const {
    return 1 + (*inputs[0].as<const bool>() ? 0 : outputs_) + output;
  }

  std::string name_;
  std::size_t outputs_;
};

constexpr Port kInputs[] = {
    {.name = "cond", .types = kBool},
    {.name = "then_branch", .presence = Presence::kAttribute, .constant = true},
    // The other constants of then_branch, and all of else_branch.
    {.name = "else_branch", .presence = Presence::kVariadic, .constant = true}};
constexpr Port kOutputs[] = {{.name = "outputs", .presence = Presence::kVariadic}};

constexpr Operator kOperators[] = {{{"", kIf, 1, 25, kInputs, kOutputs}, make<If>}};

}  // namespace

std::span<const Operator> choice_operators() { return kOperators; }

}  // namespace flownpu::cpu
