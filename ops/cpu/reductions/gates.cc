// SPDX-License-Identifier: Apache-2.0
// Operators around linear attention, of com.microsoft, on the CPU:
//   LinearAttentionGate: decay = decay_scale softplus(a + dt_bias), beta = sigmoid(b), heads last
//   GatedRMSNorm: y = x / sqrt(mean(x^2) + epsilon) scale activation(gate), for each `scale` wide
//   part
//   GatedAdd: y = X + gate Y, a gate for each row
// and LpNormalization of ONNX along one axis: y = x / |x|, 0 where all of x is 0.
#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "ops/cpu/integers.h"
#include "ops/cpu/rows.h"
#include "ops/cpu/step.h"
#include "ops/cpu/widened.h"
#include "ops/error.h"

namespace flownpu::cpu {
namespace {

// ln(1 + e^x) without overflow.
float softplus(float x) { return std::max(x, 0.0F) + std::log1p(std::exp(-std::abs(x))); }
float sigmoid(float x) { return 1.0F / (1.0F + std::exp(-x)); }

// Rows of `size` elements that one task takes at least: 4 Ki elements take some 4 us, and handing
// out a task may take longer (kElementsEach).
std::int64_t rows_at_once(std::int64_t size) {
  constexpr std::int64_t kElements = 4096;
  return std::max<std::int64_t>(1, kElements / std::max<std::int64_t>(size, 1));
}

// The sum of the squares, or of the magnitudes, of x[i step] for i < n. Of several sums, none waits
// for the last addition.
double sum_of(const float* x, std::int64_t n, std::int64_t step, bool is_of_squares) {
  constexpr int kSums = 4;
  double sums[kSums] = {};
  const auto part = [&](std::int64_t i) {
    const double value = x[i * step];
    return is_of_squares ? value * value : std::abs(value);
  };
  std::int64_t i = 0;
  for (; i + kSums <= n; i += kSums)
    for (int s = 0; s < kSums; ++s) sums[s] += part(i + s);
  for (; i < n; ++i) sums[0] += part(i);
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

class LinearAttentionGate final : public Step {
 public:
  LinearAttentionGate(const Node& node, const Context& context)
      : pool_(context.pool), name_(to_string(node)) {}

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    if (outputs.size() > 1 && !is_given(inputs, 3))
      fail("[", name_, "] expected an input b for the output beta, got none");
    for (Shape& output : outputs) output = inputs[0].shape;
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const std::int64_t heads = inputs[0].shape[-1];
    const auto* bias = inputs[1].as<const float>();
    const auto* scale = inputs[2].as<const float>();
    const bool has_beta = outputs.size() > 1 && outputs[1].data != nullptr;
    pool_->run_rows(
        inputs[0].shape.elements() / std::max<std::int64_t>(heads, 1), [&](std::int64_t row) {
          const std::int64_t at = row * heads;
          for (std::int64_t head = 0; head < heads; ++head) {
            const float a = inputs[0].as<const float>()[at + head];
            outputs[0].as<float>()[at + head] = scale[head] * softplus(a + bias[head]);
            if (has_beta)
              outputs[1].as<float>()[at + head] = sigmoid(inputs[3].as<const float>()[at + head]);
          }
        });
  }

 private:
  std::shared_ptr<ThreadPool> pool_;
  std::string name_;
};

class GatedRmsNorm final : public Step {
 public:
  GatedRmsNorm(const Node& node, const Context& context)
      : context_(context),
        name_(to_string(node)),
        epsilon_(node.number("epsilon", 1e-5F)),
        is_silu_(node.text("activation", "silu") != "sigmoid") {}

  std::optional<Slicing> slicing(const Node& node) const override {
    return slice_rows(node, {0, 2}, 1);
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const Shape& x = inputs[0].shape;
    const std::int64_t width = inputs[1].shape[0];
    if (width == 0 || x.rank() == 0 || x[-1] % width != 0 || !(inputs[2].shape == x))
      fail("[", name_, "] expected X and a gate of one shape, whose last axis is a multiple of ",
           width, ", got ", to_string(x), " and ", to_string(inputs[2].shape));
    outputs[0] = x;
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const std::int64_t width = inputs[1].shape[0];
    const auto* weight = inputs[1].as<const float>();
    context_.pool->run_rows(
        inputs[0].shape.elements() / width,
        [&](std::int64_t row) {
          const auto* gate = inputs[2].as<const float>() + row * width;
          auto* y = outputs[0].as<float>() + row * width;
          context_.kernels.rms_norm(inputs[0].as<const float>() + row * width, weight, epsilon_, y,
                                    width);
          constexpr std::int64_t kBlock = 256;
          std::array<float, kBlock> open;
          for (std::int64_t i = 0; i < width; i += kBlock) {
            const std::int64_t count = std::min(kBlock, width - i);
            context_.kernels.apply(Function::kSigmoid, gate + i, open.data(), count);
            for (std::int64_t j = 0; j < count; ++j)
              y[i + j] *= is_silu_ ? gate[i + j] * open[j] : open[j];
          }
        },
        rows_at_once(width));
  }

 private:
  Context context_;
  std::string name_;
  float epsilon_;
  bool is_silu_;
};

class GatedAdd final : public Step {
 public:
  GatedAdd(const Node& node, const Context& context) : context_(context), name_(to_string(node)) {}

  std::optional<Slicing> slicing(const Node& node) const override {
    return slice_rows(node, {0, 1, 2}, 1);
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const Shape& x = inputs[0].shape;
    const Shape& gate = inputs[2].shape;
    bool fits = inputs[1].shape == x && gate.rank() == x.rank() && gate[-1] == 1;
    for (int axis = 0; fits && axis + 1 < x.rank(); ++axis) fits = gate[axis] == x[axis];
    if (!fits)
      fail("[", name_, "] expected X and Y of one shape and a gate for each row, got ",
           to_string(x), ", ", to_string(inputs[1].shape), " and ", to_string(gate));
    outputs[0] = x;
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const Rows rows(name_, inputs[0].shape, -1);
    context_.pool->run_rows(rows.count, [&](std::int64_t row) {
      const std::int64_t at = row * rows.size;
      auto* y = outputs[0].as<float>() + at;
      const auto* x = inputs[0].as<const float>() + at;
      const auto* added = inputs[1].as<const float>() + at;
      const float gate = inputs[2].as<const float>()[row];
      for (std::int64_t i = 0; i < rows.size; ++i) y[i] = x[i] + gate * added[i];
    });
  }

 private:
  Context context_;
  std::string name_;
};

class LpNormalization final : public Step {
 public:
  LpNormalization(const Node& node, const Context& context)
      : pool_(context.pool),
        name_(to_string(node)),
        axis_(node.integer("axis", -1)),
        is_of_squares_(node.integer("p", 2) == 2) {}

  std::optional<Slicing> slicing(const Node& node) const override {
    return axis_ == -1 ? slice_rows(node, {0}, 1) : std::nullopt;
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    wrap(name_, axis_, inputs[0].shape.rank());
    outputs[0] = inputs[0].shape;
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> /*scratch*/) const override {
    const Shape& shape = inputs[0].shape;
    const std::int64_t axis = wrap(name_, axis_, shape.rank());
    const std::int64_t size = shape[static_cast<int>(axis)];
    const std::int64_t step = elements_of(shape, axis + 1, shape.rank());
    pool_->run_rows(
        elements_of(shape, 0, axis) * step,
        [&](std::int64_t line) {
          const std::int64_t at = line / step * size * step + line % step;
          const auto* x = inputs[0].as<const float>() + at;
          auto* y = outputs[0].as<float>() + at;
          const double sum = sum_of(x, size, step, is_of_squares_);
          const double norm = is_of_squares_ ? std::sqrt(sum) : sum;
          const auto factor = static_cast<float>(norm == 0 ? 0 : 1 / norm);
          for (std::int64_t i = 0; i < size; ++i) y[i * step] = x[i * step] * factor;
        },
        rows_at_once(size));
  }

 private:
  std::shared_ptr<ThreadPool> pool_;
  std::string name_;
  std::int64_t axis_;
  bool is_of_squares_;
};

constexpr Port kGateInputs[] = {
    {.name = "a", .types = kFloats, .shape = "[B,T,H]", .type_letter = 'T'},
    {.name = "dt_bias", .types = kFloat, .shape = "[H]"},
    {.name = "decay_scale", .types = kFloat, .shape = "[H]"},
    optional({.name = "b", .types = kFloats, .shape = "[B,T,H]", .type_letter = 'T'})};
constexpr Port kGateOutputs[] = {
    {.name = "decay", .types = kFloats, .shape = "[B,T,H]", .type_letter = 'T'},
    optional({.name = "beta", .types = kFloats, .shape = "[B,T,H]", .type_letter = 'T'})};

constexpr Port kNormInputs[] = {
    {.name = "X", .types = kFloats, .type_letter = 'T'},
    {.name = "scale", .types = kFloats, .shape = "[C]", .type_letter = 'T'},
    {.name = "gate", .types = kFloats, .type_letter = 'T'}};
constexpr AttributeRule kNormAttributes[] = {text("activation", "silu|swish|sigmoid"),
                                             number("epsilon")};

constexpr Port kAddInputs[] = {{.name = "X", .types = kFloats, .type_letter = 'T'},
                               {.name = "Y", .types = kFloats, .type_letter = 'T'},
                               {.name = "gate", .types = kFloats, .type_letter = 'T'}};

constexpr Port kX[] = {{.name = "input", .types = kFloats, .type_letter = 'T'}};
constexpr Port kY[] = {{.name = "output", .types = kFloats, .type_letter = 'T'}};
constexpr AttributeRule kLpAttributes[] = {axis("axis"), integer("p", 1, 2)};

constexpr Operator kOperators[] = {
    {{"com.microsoft", "LinearAttentionGate", 1, 1, kGateInputs, kGateOutputs},
     widened<make<LinearAttentionGate>>},
    {{"com.microsoft", "GatedRMSNorm", 1, 1, kNormInputs, kY, kNormAttributes},
     widened<make<GatedRmsNorm>>},
    {{"com.microsoft", "GatedAdd", 1, 1, kAddInputs, kY}, widened<make<GatedAdd>>},
    {{"", "LpNormalization", 1, 22, kX, kY, kLpAttributes}, widened<make<LpNormalization>>}};

}  // namespace

std::span<const Operator> gate_operators() { return kOperators; }

}  // namespace flownpu::cpu
