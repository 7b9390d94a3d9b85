// SPDX-License-Identifier: Apache-2.0
// QuantizeLinear, y = round(x / scale) + zero_point, saturated, of 8 bits; DequantizeLinear, y = (x
// - zero_point) * scale; DynamicQuantizeLinear, whose scale and zero point come from x. Halves are
// rounded to even. A DequantizeLinear of a product's weight has no step of its own: the product
// reads x itself (ops/lowering/dense_matmul.cc).
#include <algorithm>
#include <cmath>

#include "ops/cpu/broadcast.h"
#include "ops/cpu/integers.h"
#include "ops/cpu/step.h"
#include "ops/error.h"

namespace flownpu::cpu {
namespace {

// One scale and zero point for all elements, or one of each for every index of an axis.
class Linear : public Step {
 public:
  Linear(const Node& node, const Context& context)
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

 protected:
  // Calls work(begin, end, index of scale) for runs of elements that share a scale, on all threads.
  template <typename Work>
  void each_run(std::span<const Tensor> inputs, const Work& work) const {
    const Shape& shape = inputs[0].shape;
    const std::int64_t groups = inputs[1].shape.elements();
    std::int64_t count = 1;
    for (int i = groups == 1 ? 0 : axis(shape) + 1; i < shape.rank(); ++i) count *= shape[i];
    if (count == 0) return;
    in_parallel(*context_.pool, shape.elements(), [&](std::int64_t begin, std::int64_t end) {
      while (begin < end) {
        const std::int64_t stop = std::min(end, (begin / count + 1) * count);
        work(begin, stop, begin / count % groups);
        begin = stop;
      }
    });
  }

  const Context& context() const { return context_; }

 private:
  int axis(const Shape& shape) const {
    return shape.rank() == 0 ? 0 : static_cast<int>(wrap(name_, axis_, shape.rank()));
  }

  Context context_;
  std::string name_;
  std::int64_t axis_;
};

class QuantizeLinear final : public Linear {
 public:
  using Linear::Linear;

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const bool is_signed = outputs[0].type == DataType::kInt8;
    each_run(inputs, [&](std::int64_t begin, std::int64_t end, std::int64_t group) {
      const int zero = is_given(inputs, 2) ? byte_at(inputs[2], group) : 0;
      context().kernels.quantize(inputs[0].as<const float>() + begin, end - begin,
                                 inputs[1].as<const float>()[group], zero, is_signed,
                                 outputs[0].as<std::byte>() + begin);
    });
  }
};

class DequantizeLinear final : public Linear {
 public:
  using Linear::Linear;

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const Tensor& x = inputs[0];
    each_run(inputs, [&](std::int64_t begin, std::int64_t end, std::int64_t group) {
      const float scale = inputs[1].as<const float>()[group];
      float* y = outputs[0].as<float>();
      if (x.type == DataType::kInt32) {  // a bias, whose zero point is 0
        for (std::int64_t i = begin; i < end; ++i)
          y[i] = static_cast<float>(x.as<const std::int32_t>()[i]) * scale;
        return;
      }
      const int zero = is_given(inputs, 2) ? byte_at(inputs[2], group) : 0;
      context().kernels.dequantize(x.as<const std::byte>() + begin, end - begin, scale, zero,
                                   x.type == DataType::kInt8, y + begin);
    });
  }
};

// scale = (max(x, 0) - min(x, 0)) / 255, zero_point = round(-min(x, 0) / scale), saturated; all x
// equal to 0: scale 1, as ONNX Runtime has it.
class DynamicQuantizeLinear final : public Step {
 public:
  DynamicQuantizeLinear(const Node& /*node*/, const Context& context) : context_(context) {}

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    outputs[0] = inputs[0].shape;
    for (std::size_t i = 1; i < outputs.size(); ++i) outputs[i] = Shape();
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    constexpr float kSteps = 255;
    const auto* x = inputs[0].as<const float>();
    const std::int64_t count = inputs[0].shape.elements();
    const float lowest = count == 0 ? 0 : std::min(context_.kernels.smallest(x, count), 0.0F);
    const float highest = count == 0 ? 0 : std::max(context_.kernels.largest(x, count), 0.0F);
    const float scale = highest == lowest ? 1 : (highest - lowest) / kSteps;
    const float zero = std::clamp(std::nearbyint(-lowest / scale), 0.0F, kSteps);
    *outputs[1].as<float>() = scale;
    *outputs[2].as<std::uint8_t>() = static_cast<std::uint8_t>(zero);
    in_parallel(*context_.pool, count, [&](std::int64_t begin, std::int64_t end) {
      context_.kernels.quantize(x + begin, end - begin, scale, static_cast<int>(zero), false,
                                outputs[0].as<std::byte>() + begin);
    });
  }

 private:
  Context context_;
};

constexpr Types kQuantized{DataType::kInt8, DataType::kUInt8, DataType::kInt32};
constexpr Port kQuantizedInputs[] = {
    {.name = "x", .types = kQuantized, .type_letter = 'X'},
    {.name = "x_scale", .types = kFloat},
    optional({.name = "x_zero_point", .types = kQuantized, .type_letter = 'X'})};
constexpr Port kFloatInputs[] = {
    {.name = "x", .types = kFloat},
    {.name = "y_scale", .types = kFloat},
    optional({.name = "y_zero_point", .types = kBytes, .type_letter = 'Y'})};
constexpr Port kFloatResult[] = {{.name = "y", .types = kFloat}};
constexpr Port kByteResult[] = {{.name = "y", .types = kBytes, .type_letter = 'Y'}};
constexpr Port kX[] = {{.name = "x", .types = kFloat}};
constexpr Port kDynamicResults[] = {{.name = "y", .types = kUInt8},
                                    {.name = "y_scale", .types = kFloat},
                                    {.name = "y_zero_point", .types = kUInt8}};
// The results are float; output_dtype 0 and 1 both say so.
constexpr AttributeRule kDequantized[] = {axis("axis"), only("block_size", 0),
                                          integer("output_dtype", 0, 1)};
// The type of the result is its value's; `precision` 1 is float, as is 0.
constexpr AttributeRule kAttributes[] = {axis("axis"), only("block_size", 0), flag("saturate"),
                                         integer("output_dtype", 0, 3), flag("precision")};

constexpr Operator kOperators[] = {
    {{"", "QuantizeLinear", 10, 25, kFloatInputs, kByteResult, kAttributes}, make<QuantizeLinear>},
    {{"", "DequantizeLinear", 10, 25, kQuantizedInputs, kFloatResult, kDequantized},
     make<DequantizeLinear>},
    {{"", "DynamicQuantizeLinear", 11, 11, kX, kDynamicResults}, make<DynamicQuantizeLinear>},
};

}  // namespace

std::span<const Operator> quantization_operators() { return kOperators; }

}  // namespace flownpu::cpu
