// SPDX-License-Identifier: Apache-2.0
// QuantizeLinear, y = round(x / scale) + zero_point, saturated; DequantizeLinear, y = (x -
// zero_point) * scale; both of 8 or 4 bits. DynamicQuantizeLinear, of 8 bits, whose scale and zero
// point come from x. Halves are rounded to even. A DequantizeLinear of a product's weight has no
// step of its own: the product reads x itself (ops/lowering/dense_matmul.cc, q4nx_dequantized.cc).
#include "ops/nodes/quantization.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "ops/cpu/broadcast.h"
#include "ops/cpu/integers.h"
#include "ops/cpu/step.h"
#include "ops/error.h"

namespace flownpu::cpu {
namespace {

// One scale and zero point for all elements, for every index of an axis, or for every block along
// it.
class Linear : public Step {
 public:
  Linear(const Node& node, const Context& context)
      : context_(context),
        name_(to_string(node)),
        axis_(node.integer("axis", 1)),
        block_size_(node.integer("block_size", 0)) {}

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const Shape& x = inputs[0].shape;
    const Shape& scale = inputs[1].shape;
    scales_of(inputs);
    // A single scale and a single zero point may be scalars or have one axis, each by itself.
    if (is_given(inputs, 2) && inputs[2].shape.elements() != scale.elements())
      fail("[", name_, "] expected zero_point of the scale's shape, ", to_string(scale), ", got ",
           to_string(inputs[2].shape));
    outputs[0] = x;
  }

 protected:
  // Calls work(begin, end, scale, zero point) for runs of elements that share them, on all threads.
  // A thread's first run begins at an even element, where a byte of 4-bit codes does. Runs have
  // kRun elements at most.
  template <typename Work>
  void each_run(std::span<const Tensor> inputs, const Work& work) const {
    const std::int64_t elements = inputs[0].shape.elements();
    const Scales scales = scales_of(inputs);
    in_parallel(*context_.pool, (elements + 1) / 2, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin * 2; i < std::min(end * 2, elements);) {
        const std::int64_t stop = std::min({i + kRun, i + scales.shared(i), end * 2, elements});
        const std::int64_t group = scales.index(i);
        work(i, stop, inputs[1].as<const float>()[group],
             is_given(inputs, 2) ? code_at(inputs[2].type, inputs[2].data, group) : 0);
        i = stop;
      }
    });
  }

  // Codes of 8 bits that fit the first-level cache beside their floats.
  static constexpr std::int64_t kRun = 1024;
  using Codes = std::array<std::int8_t, kRun>;
  const Context& context() const { return context_; }

 private:
  Scales scales_of(std::span<const Tensor> inputs) const {
    const Shape& x = inputs[0].shape;
    const Shape& scale = inputs[1].shape;
    if (const auto scales = Scales::of(x, scale, axis_, block_size_)) return *scales;
    fail("[", name_, "] expected one scale, or one for each index",
         block_size_ > 0 ? " or block" : "", " of axis ", axis_, " of ", to_string(x), ", got ",
         to_string(scale));
  }

  Context context_;
  std::string name_;
  std::int64_t axis_;
  std::int64_t block_size_;
};

bool is_signed(DataType type) { return type == DataType::kInt8 || type == DataType::kInt4; }

// Stores codes of 8 bits as those of 4 bits, saturated, from element `begin` on.
void pack(const std::int8_t* codes, bool is_signed, std::int64_t begin, std::int64_t end,
          std::uint8_t* packed) {
  for (std::int64_t i = begin; i < end; ++i) {
    const int code = is_signed ? std::clamp<int>(codes[i - begin], -8, 7)
                               : std::min<int>(static_cast<std::uint8_t>(codes[i - begin]), 15);
    std::uint8_t& byte = packed[i / 2];
    byte = static_cast<std::uint8_t>(i % 2 == 0 ? code & 15 : (byte & 15) | (code & 15) << 4);
  }
}

class QuantizeLinear final : public Linear {
 public:
  using Linear::Linear;

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const Tensor& y = outputs[0];
    each_run(inputs, [&](std::int64_t begin, std::int64_t end, float scale, int zero) {
      const float* x = inputs[0].as<const float>() + begin;
      if (!is_packed(y.type)) {
        context().kernels.quantize(x, end - begin, scale, zero, is_signed(y.type),
                                   y.as<std::byte>() + begin);
        return;
      }
      Codes codes;
      context().kernels.quantize(x, end - begin, scale, zero, is_signed(y.type), codes.data());
      pack(codes.data(), is_signed(y.type), begin, end, y.as<std::uint8_t>());
    });
  }
};

class DequantizeLinear final : public Linear {
 public:
  using Linear::Linear;

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const Tensor& x = inputs[0];
    each_run(inputs, [&](std::int64_t begin, std::int64_t end, float scale, int zero) {
      float* y = outputs[0].as<float>() + begin;
      if (x.type == DataType::kInt32) {  // a bias, whose zero point is 0
        for (std::int64_t i = begin; i < end; ++i)
          *y++ = static_cast<float>(x.as<const std::int32_t>()[i]) * scale;
        return;
      }
      if (!is_packed(x.type)) {
        context().kernels.dequantize(x.as<const std::byte>() + begin, end - begin, scale, zero,
                                     is_signed(x.type), y);
        return;
      }
      Codes codes;
      for (std::int64_t i = begin; i < end; ++i)
        codes[static_cast<std::size_t>(i - begin)] =
            static_cast<std::int8_t>(code_at(x.type, x.data, i));
      context().kernels.dequantize(codes.data(), end - begin, scale, zero, true, y);
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

constexpr Types kCodes{DataType::kInt8, DataType::kUInt8, DataType::kInt4, DataType::kUInt4};
constexpr Types kQuantized{DataType::kInt8, DataType::kUInt8, DataType::kInt32, DataType::kInt4,
                           DataType::kUInt4};
constexpr Port kQuantizedInputs[] = {
    {.name = "x", .types = kQuantized, .type_letter = 'X'},
    {.name = "x_scale", .types = kFloat},
    optional({.name = "x_zero_point", .types = kQuantized, .type_letter = 'X'})};
constexpr Port kFloatInputs[] = {
    {.name = "x", .types = kFloat},
    {.name = "y_scale", .types = kFloat},
    optional({.name = "y_zero_point", .types = kCodes, .type_letter = 'Y'})};
constexpr Port kFloatResult[] = {{.name = "y", .types = kFloat}};
constexpr Port kCodeResult[] = {{.name = "y", .types = kCodes, .type_letter = 'Y'}};
constexpr Port kX[] = {{.name = "x", .types = kFloat}};
constexpr Port kDynamicResults[] = {{.name = "y", .types = kUInt8},
                                    {.name = "y_scale", .types = kFloat},
                                    {.name = "y_zero_point", .types = kUInt8}};
// The results are float; output_dtype 0 and 1 both say so.
constexpr AttributeRule kDequantized[] = {axis("axis"), count("block_size", 0),
                                          integer("output_dtype", 0, 1)};
// The type of the result is its value's; `precision` 1 is float, as is 0.
constexpr AttributeRule kAttributes[] = {axis("axis"), count("block_size", 0), flag("saturate"),
                                         integer("output_dtype", 0, 22), flag("precision")};

constexpr Operator kOperators[] = {
    {{"", "QuantizeLinear", 10, 25, kFloatInputs, kCodeResult, kAttributes}, make<QuantizeLinear>},
    {{"", "DequantizeLinear", 10, 25, kQuantizedInputs, kFloatResult, kDequantized},
     make<DequantizeLinear>},
    {{"", "DynamicQuantizeLinear", 11, 11, kX, kDynamicResults}, make<DynamicQuantizeLinear>},
};

}  // namespace

std::span<const Operator> quantization_operators() { return kOperators; }

}  // namespace flownpu::cpu
