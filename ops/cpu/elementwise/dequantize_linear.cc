// SPDX-License-Identifier: Apache-2.0
// DequantizeLinear of 8-bit integers: y = (x - zero_point) * scale. A DequantizeLinear of a
// product's weight has no step of its own: the product reads x itself
// (ops/lowering/dense_matmul.cc).
#include <algorithm>

#include "ops/cpu/integers.h"
#include "ops/cpu/step.h"
#include "ops/error.h"

namespace flownpu::cpu {
namespace {

class DequantizeLinear final : public Step {
 public:
  DequantizeLinear(const Node& node, const Context& context)
      : context_(context), name_(to_string(node)), axis_(node.integer("axis", 1)) {}

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const Shape& x = inputs[0].shape;
    const Shape& scale = inputs[1].shape;
    if (scale.elements() != 1 && (scale.rank() != 1 || scale[0] != x[axis(x)])) {
      fail("[", name_, "] expected one scale, or ", x[axis(x)], " of them, got ", to_string(scale));
    }
    // A single scale and a single zero point may be scalars or have one axis, each by itself.
    if (is_given(inputs, 2) && inputs[2].shape.elements() != scale.elements())
      fail("[", name_, "] expected zero_point of the scale's shape, ", to_string(scale), ", got ",
           to_string(inputs[2].shape));
    outputs[0] = x;
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    if (inputs[0].type == DataType::kInt8) return run_typed<std::int8_t>(inputs, outputs[0]);
    run_typed<std::uint8_t>(inputs, outputs[0]);
  }

 private:
  int axis(const Shape& shape) const {
    return shape.rank() == 0 ? 0 : static_cast<int>(wrap(name_, axis_, shape.rank()));
  }

  template <typename T>
  void run_typed(std::span<const Tensor> inputs, const Tensor& output) const {
    const Shape& shape = inputs[0].shape;
    const auto* x = inputs[0].as<const T>();
    const auto* scales = inputs[1].as<const float>();
    const T* zeros = inputs.size() > 2 ? inputs[2].as<const T>() : nullptr;
    // How many consecutive elements share a scale.
    std::int64_t count = 1;
    const std::int64_t groups = inputs[1].shape.elements();
    for (int i = groups == 1 ? 0 : axis(shape) + 1; i < shape.rank(); ++i) count *= shape[i];
    const std::int64_t runs = count == 0 ? 0 : shape.elements() / count;
    context_.pool->run(runs, [&](std::int64_t run) {
      const float scale = scales[run % groups];
      const int zero = zeros == nullptr ? 0 : zeros[run % groups];
      for (std::int64_t i = run * count; i < (run + 1) * count; ++i)
        output.as<float>()[i] = static_cast<float>(x[i] - zero) * scale;
    });
  }

  Context context_;
  std::string name_;
  std::int64_t axis_;
};

constexpr Port kInputs[] = {
    {.name = "x", .types = kBytes, .type_letter = 'X'},
    {.name = "x_scale", .types = kFloat},
    optional({.name = "x_zero_point", .types = kBytes, .type_letter = 'X'})};
constexpr Port kOutputs[] = {{.name = "y", .types = kFloat}};
// There is one scale for all, or one for each index of an axis. The output is float; output_dtype 0
// and 1 both say so.
constexpr AttributeRule kAttributes[] = {axis("axis"), only("block_size", 0),
                                         integer("output_dtype", 0, 1)};

constexpr Operator kOperators[] = {
    {{"", "DequantizeLinear", 10, 25, kInputs, kOutputs, kAttributes},
     [](const Node& node, const Context& context) -> std::unique_ptr<Step> {
       return std::make_unique<DequantizeLinear>(node, context);
     }},
};

}  // namespace

std::span<const Operator> dequantize_operators() { return kOperators; }

}  // namespace flownpu::cpu
