// SPDX-License-Identifier: Apache-2.0
// CausalConvWithState, of com.microsoft and of ONNX, on the CPU: a depthwise convolution of each
// channel's past and present elements, which hands on its last elements as the state.
//
//   input f32 [B, C, L], weight f32 [C, 1, k], bias f32 [C], past_state f32 [B, C, (k - 1)
//   dilation] output[t] = activation(bias + sum_j weight[j] x[t + j dilation]) for x = past_state,
//   input present_state: the last (k - 1) dilation elements of x
//
// Without past_state x begins with zeros.
#include <algorithm>

#include "ops/cpu/integers.h"
#include "ops/cpu/step.h"
#include "ops/cpu/widened.h"
#include "ops/error.h"

namespace flownpu::cpu {
namespace {

class CausalConvolution final : public Step {
 public:
  CausalConvolution(const Node& node, const Context& context)
      : context_(context),
        name_(to_string(node)),
        dilation_(node.integer("dilation", 1)),
        is_silu_(node.text("activation", "none") != "none") {}

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const Shape& x = inputs[0].shape;
    const Shape& weight = inputs[1].shape;
    if (weight[2] < 1) fail("[", name_, "] expected a weight of at least one column, got [C,1,0]");
    const Shape state{x[0], x[1], state_size(weight)};
    if (is_given(inputs, kPast) && !(inputs[kPast].shape == state))
      fail("[", name_, "] expected past_state of shape ", to_string(state), ", got ",
           to_string(inputs[kPast].shape));
    outputs[0] = x;
    if (outputs.size() > 1) outputs[1] = state;
  }

  // A channel's x and, with an activation, its sigmoids, for each thread.
  std::size_t scratch_bytes(std::span<const Tensor> inputs) const override {
    return static_cast<std::size_t>(context_.pool->threads()) * bytes(inputs);
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> scratch) const override {
    const Shape& shape = inputs[0].shape;
    const std::int64_t channels = shape[1];
    const std::int64_t length = shape[2];
    const std::int64_t taps = inputs[1].shape[2];
    const std::int64_t state = state_size(inputs[1].shape);
    const bool has_state = outputs.size() > 1 && outputs[1].data != nullptr;
    const auto channel = [&](std::int64_t row, std::byte* memory) {
      Scratch parts(memory);
      auto* x = parts.take<float>(state + length);
      auto* sigmoids = parts.take<float>(length);
      if (is_given(inputs, kPast)) {
        std::copy_n(inputs[kPast].as<const float>() + row * state, state, x);
      } else {
        std::fill_n(x, state, 0.0F);
      }
      std::copy_n(inputs[0].as<const float>() + row * length, length, x + state);
      auto* y = outputs[0].as<float>() + row * length;
      const std::int64_t c = row % channels;
      convolve(x, inputs[1].as<const float>() + c * taps, taps,
               is_given(inputs, kBias) ? inputs[kBias].as<const float>()[c] : 0.0F, y, length);
      if (is_silu_) {
        context_.kernels.apply(Function::kSigmoid, y, sigmoids, length);
        for (std::int64_t t = 0; t < length; ++t) y[t] *= sigmoids[t];
      }
      if (has_state) std::copy_n(x + length, state, outputs[1].as<float>() + row * state);
    };
    // A token has one element a channel: many channels are one task.
    constexpr std::int64_t kElements = 2048;
    const std::int64_t each =
        std::max<std::int64_t>(1, kElements / std::max<std::int64_t>(length, 1));
    const std::int64_t rows = shape[0] * channels;
    context_.pool->run((rows + each - 1) / each, [&](std::int64_t task, std::size_t thread) {
      std::byte* memory = scratch.data() + thread * bytes(inputs);
      for (std::int64_t row = task * each; row < std::min(rows, (task + 1) * each); ++row)
        channel(row, memory);
    });
  }

 private:
  static constexpr std::size_t kBias = 2;
  static constexpr std::size_t kPast = 3;

  std::int64_t state_size(const Shape& weight) const { return (weight[2] - 1) * dilation_; }

  std::size_t bytes(std::span<const Tensor> inputs) const {
    Scratch parts;
    const std::int64_t length = inputs[0].shape[2];
    parts.take<float>(state_size(inputs[1].shape) + length);
    parts.take<float>(length);
    return parts.bytes();
  }

  void convolve(const float* x, const float* weight, std::int64_t taps, float bias, float* y,
                std::int64_t length) const {
    std::fill_n(y, length, bias);
    for (std::int64_t tap = 0; tap < taps; ++tap) {
      if (length == 1) {
        y[0] += weight[tap] * x[tap * dilation_];
      } else {
        context_.kernels.add_scaled(x + tap * dilation_, weight[tap], y, length);
      }
    }
  }

  Context context_;
  std::string name_;
  std::int64_t dilation_;
  bool is_silu_;
};

constexpr Port kInputs[] = {
    {.name = "input", .types = kFloats, .shape = "[B,C,L]", .type_letter = 'T'},
    {.name = "weight", .types = kFloats, .shape = "[C,1,K]", .type_letter = 'T'},
    optional({.name = "bias", .types = kFloats, .shape = "[C]", .type_letter = 'T'}),
    optional({.name = "past_state", .types = kFloats, .shape = "[B,C,?]", .type_letter = 'T'})};
constexpr Port kOutputs[] = {
    {.name = "output", .types = kFloats, .shape = "[B,C,L]", .type_letter = 'T'},
    optional({.name = "present_state", .types = kFloats, .shape = "[B,C,?]", .type_letter = 'T'})};
constexpr AttributeRule kStandardAttributes[] = {text("activation", "none|silu|swish")};
constexpr AttributeRule kAttributes[] = {text("activation", "none|silu|swish"),
                                         count("dilation", 1), only("ndim", 1),
                                         only("channels_last", 0), only("state_window", 0)};

constexpr Operator kOperators[] = {
    {{"", "CausalConvWithState", 27, 27, kInputs, kOutputs, kStandardAttributes},
     widened<make<CausalConvolution>>},
    {{"com.microsoft", "CausalConvWithState", 1, 1, kInputs, kOutputs, kAttributes},
     widened<make<CausalConvolution>>}};

}  // namespace

std::span<const Operator> causal_convolution_operators() { return kOperators; }

}  // namespace flownpu::cpu
