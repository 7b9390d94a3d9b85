// SPDX-License-Identifier: Apache-2.0
// CausalConvWithState, of com.microsoft and of ONNX, on the CPU: a depthwise convolution of each
// channel's past and present elements, which hands on its last elements as the state.
//
//   input f32 [B, C, L], weight f32 [C, 1, k], bias f32 [C], past_state f32 [B, C, (k - 1)
//   dilation] output[t] = activation(bias + sum_j weight[j] x[t + j dilation]) for x = past_state,
//   input present_state: the last (k - 1) dilation elements of x
//
// Without past_state x begins with zeros. With channels_last of com.microsoft, tokens lie next to
// each other: input and output are [B, L, C], past_state [B, (k - 1) dilation, C]; the weight is
// as above.
#include <algorithm>
#include <vector>

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
        is_silu_(node.text("activation", "none") != "none"),
        channels_last_(node.integer("channels_last", 0) != 0) {
    const Value& weight = node.inputs[kWeight];
    if (!channels_last_ || weight.constant == nullptr || !weight.shape) return;
    taps_.resize(weight.shape->elements());
    transpose(static_cast<const float*>(weight.constant), *weight.shape, taps_.data());
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const Shape& x = inputs[0].shape;
    const Shape& weight = inputs[kWeight].shape;
    if (weight[0] != x[channel_axis()])
      fail("[", name_, "] expected an input of ", weight[0], " channels, got ", to_string(x));
    if (weight[2] < 1) fail("[", name_, "] expected a weight of at least one column, got [C,1,0]");
    const std::int64_t before = state_size(weight);
    const Shape state = channels_last_ ? Shape{x[0], before, x[2]} : Shape{x[0], x[1], before};
    if (is_given(inputs, kPast) && !(inputs[kPast].shape == state))
      fail("[", name_, "] expected past_state of shape ", to_string(state), ", got ",
           to_string(inputs[kPast].shape));
    outputs[0] = x;
    if (outputs.size() > 1) outputs[1] = state;
  }

  // A channel's x and the sigmoids of a task's channels, for each thread. Or, of tokens, the weight
  // by its taps, zeros, and each thread's rows.
  std::size_t scratch_bytes(std::span<const Tensor> inputs) const override {
    if (channels_last_) {
      Scratch parts;
      parts.take<float>(inputs[kWeight].shape.elements());
      parts.take<float>(inputs[kWeight].shape[0]);
      parts.take<const float*>(context_.pool->threads() * inputs[kWeight].shape[2]);
      return parts.bytes();
    }
    return static_cast<std::size_t>(context_.pool->threads()) * bytes(inputs);
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> scratch) const override {
    if (channels_last_) return run_tokens(inputs, outputs, scratch);
    const Shape& shape = inputs[0].shape;
    const std::int64_t channels = shape[1];
    const std::int64_t length = shape[2];
    const std::int64_t taps = inputs[kWeight].shape[2];
    const std::int64_t state = state_size(inputs[kWeight].shape);
    const bool has_state = outputs.size() > 1 && outputs[1].data != nullptr;
    const auto channel = [&](std::int64_t row, float* x) {
      if (is_given(inputs, kPast)) {
        std::copy_n(inputs[kPast].as<const float>() + row * state, state, x);
      } else {
        std::fill_n(x, state, 0.0F);
      }
      std::copy_n(inputs[0].as<const float>() + row * length, length, x + state);
      const std::int64_t c = row % channels;
      convolve(x, inputs[kWeight].as<const float>() + c * taps, taps,
               is_given(inputs, kBias) ? inputs[kBias].as<const float>()[c] : 0.0F,
               outputs[0].as<float>() + row * length, length);
      if (has_state) std::copy_n(x + length, state, outputs[1].as<float>() + row * state);
    };
    const std::int64_t each = channels_of_task(length);
    const std::int64_t rows = shape[0] * channels;
    context_.pool->run((rows + each - 1) / each, [&](std::int64_t task, std::size_t thread) {
      Scratch parts(scratch.data() + thread * bytes(inputs));
      auto* x = parts.take<float>(state + length);
      const std::int64_t first = task * each;
      const std::int64_t count = std::min(rows - first, each);
      for (std::int64_t row = first; row < first + count; ++row) channel(row, x);
      if (!is_silu_) return;
      auto* sigmoids = parts.take<float>(each * length);
      auto* y = outputs[0].as<float>() + first * length;
      context_.kernels.apply(Function::kSigmoid, y, sigmoids, count * length);
      for (std::int64_t i = 0; i < count * length; ++i) y[i] *= sigmoids[i];
    });
  }

 private:
  static constexpr std::size_t kWeight = 1;
  static constexpr std::size_t kBias = 2;
  static constexpr std::size_t kPast = 3;

  int channel_axis() const { return channels_last_ ? 2 : 1; }

  // [C, 1, k] to [k, C].
  static void transpose(const float* weight, const Shape& shape, float* by_tap) {
    for (std::int64_t channel = 0; channel < shape[0]; ++channel)
      for (std::int64_t tap = 0; tap < shape[2]; ++tap)
        by_tap[tap * shape[0] + channel] = weight[channel * shape[2] + tap];
  }

  // Tokens of all channels, a few of them a task; of a single token, parts of the channels.
  void run_tokens(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
                  std::span<std::byte> scratch) const {
    const Shape& shape = inputs[0].shape;
    const std::int64_t length = shape[1];
    const std::int64_t channels = shape[2];
    const std::int64_t taps = inputs[kWeight].shape[2];
    const std::int64_t state = state_size(inputs[kWeight].shape);
    Scratch parts(scratch.data());
    auto* by_tap = parts.take<float>(taps * channels);
    auto* zeros = parts.take<float>(channels);
    auto* rows = parts.take<const float*>(context_.pool->threads() * taps);
    std::fill_n(zeros, channels, 0.0F);
    if (taps_.empty()) transpose(inputs[kWeight].as<const float>(), inputs[kWeight].shape, by_tap);
    // Token `token` of row `row`; negative ones are in the state.
    const auto at = [&](std::int64_t row, std::int64_t token) -> const float* {
      if (token >= 0) return inputs[0].as<const float>() + (row * length + token) * channels;
      if (!is_given(inputs, kPast)) return zeros;
      return inputs[kPast].as<const float>() + (row * state + state + token) * channels;
    };
    constexpr std::int64_t kTokens = 8;
    // A token's 6,144 channels took 24 us in three tasks beside a worker that fetches ahead, and 17
    // where the caller did them all (Zen 3).
    constexpr std::int64_t kChannels = 8192;
    const std::int64_t width = length < kTokens ? kChannels : channels;
    const std::int64_t across = (channels + width - 1) / width;
    const std::int64_t down = (length + kTokens - 1) / kTokens;
    context_.pool->run(shape[0] * down * across, [&](std::int64_t task, std::size_t thread) {
      const std::int64_t first = task % across * width;
      const std::int64_t row = task / across / down;
      const std::int64_t begin = task / across % down * kTokens;
      const float** x = rows + static_cast<std::int64_t>(thread) * taps;
      ConvolvedToken call{
          .x = x,
          .weight = (taps_.empty() ? by_tap : taps_.data()) + first,
          .weight_stride = channels,
          .taps = taps,
          .bias = is_given(inputs, kBias) ? inputs[kBias].as<const float>() + first : nullptr,
          .is_silu = is_silu_,
          .channels = std::min(width, channels - first)};
      for (std::int64_t token = begin; token < std::min(length, begin + kTokens); ++token) {
        call.y = outputs[0].as<float>() + (row * length + token) * channels + first;
        for (std::int64_t tap = 0; tap < taps; ++tap)
          x[tap] = at(row, token - state + tap * dilation_) + first;
        context_.kernels.convolve_token(call);
      }
    });
    if (outputs.size() < 2 || outputs[1].data == nullptr) return;
    // A state in the memory of the last one: each token is read before it is overwritten.
    for (std::int64_t row = 0; row < shape[0]; ++row) {
      for (std::int64_t place = 0; place < state; ++place)
        std::copy_n(at(row, length - state + place), channels,
                    outputs[1].as<float>() + (row * state + place) * channels);
    }
  }

  std::int64_t state_size(const Shape& weight) const { return (weight[2] - 1) * dilation_; }

  std::size_t bytes(std::span<const Tensor> inputs) const {
    Scratch parts;
    const std::int64_t length = inputs[0].shape[2];
    parts.take<float>(state_size(inputs[kWeight].shape) + length);
    parts.take<float>(channels_of_task(length) * length);
    return parts.bytes();
  }

  // A token has one element a channel: many channels are one task.
  static std::int64_t channels_of_task(std::int64_t length) {
    constexpr std::int64_t kElements = 2048;
    return std::max<std::int64_t>(1, kElements / std::max<std::int64_t>(length, 1));
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
  bool channels_last_;
  // A constant weight, [k, C].
  std::vector<float> taps_;
};

constexpr Port kInputs[] = {
    {.name = "input", .types = kFloats, .shape = "[B,?,?]", .type_letter = 'T'},
    {.name = "weight", .types = kFloats, .shape = "[C,1,?]", .type_letter = 'T'},
    optional({.name = "bias", .types = kFloats, .shape = "[C]", .type_letter = 'T'}),
    optional({.name = "past_state", .types = kFloats, .shape = "[B,?,?]", .type_letter = 'T'})};
constexpr Port kOutputs[] = {
    {.name = "output", .types = kFloats, .shape = "[B,?,?]", .type_letter = 'T'},
    optional({.name = "present_state", .types = kFloats, .shape = "[B,?,?]", .type_letter = 'T'})};
constexpr AttributeRule kStandardAttributes[] = {text("activation", "none|silu|swish")};
constexpr AttributeRule kAttributes[] = {text("activation", "none|silu|swish"),
                                         count("dilation", 1), only("ndim", 1),
                                         integer("channels_last", 0, 1), only("state_window", 0)};

constexpr Operator kOperators[] = {
    {{"", "CausalConvWithState", 27, 27, kInputs, kOutputs, kStandardAttributes},
     widened<make<CausalConvolution>>},
    {{"com.microsoft", "CausalConvWithState", 1, 1, kInputs, kOutputs, kAttributes},
     widened<make<CausalConvolution>>}};

}  // namespace

std::span<const Operator> causal_convolution_operators() { return kOperators; }

}  // namespace flownpu::cpu
