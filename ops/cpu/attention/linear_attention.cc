// SPDX-License-Identifier: Apache-2.0
// LinearAttention, of com.microsoft and of ONNX, on the CPU: heads whose memory of the tokens
// before is a state of fixed size (ONNX's LinearAttention has the equations of the four update
// rules).
//
//   query f32 [B, T, Hq dk], key f32 [B, T, Hk dk], value f32 [B, T, Hv dv]
//   past_state f32 [B, Hv, dk, dv], decay f32 [B, T, Hv] or [B, T, Hv dk], beta f32 [B, T, Hv] or
//   [B, T, 1]
//   output f32 [B, T, max(Hq, Hv) dv], present_state f32 [B, Hv, dk, dv]
//
// States of 16 bits are widened and narrowed a head at a time, in a core's caches: a token then
// reads and writes half as many bytes, and rounds the state once. With random inputs, heads of 64
// and decays of 0.998 to 1, states in bfloat16 changed the gated delta rule's outputs by 2 % (root
// of mean squares) of the last 4,096 of 32,768 tokens, states in f32 by 3e-7.
//
// Head h of the values has the keys h Hk / Hv; output o is of query o Hq / n and values o Hv / n
// for n = max(Hq, Hv). Each head of values is a task.
#include <algorithm>
#include <cmath>

#include "ops/cpu/integers.h"
#include "ops/cpu/step.h"
#include "ops/cpu/widened.h"
#include "ops/error.h"

namespace flownpu::cpu {
namespace {

struct RecurrenceSizes {
  std::int64_t batches;
  std::int64_t tokens;
  std::int64_t key_heads;
  std::int64_t key_size;
  std::int64_t value_size;
  // Factors of a state: one, or one for each of its rows.
  std::int64_t decays;
};

constexpr std::size_t kPastState = 3;

class LinearAttention final : public Step {
  static constexpr std::size_t kQuery = 0;
  static constexpr std::size_t kKey = 1;
  static constexpr std::size_t kValue = 2;
  static constexpr std::size_t kDecay = 4;
  static constexpr std::size_t kBeta = 5;

 public:
  LinearAttention(const Node& node, const Context& context)
      : pool_(context.pool),
        kernels_(context.kernels),
        name_(to_string(node)),
        query_heads_(node.integer("q_num_heads", 0)),
        value_heads_(node.integer("kv_num_heads", 0)),
        scale_(node.number("scale", 0)) {
    const std::string rule = node.text("update_rule", "gated_delta");
    is_gated_ = rule.starts_with("gated");
    is_delta_ = rule.ends_with("delta");
    if (std::max(query_heads_, value_heads_) % std::min(query_heads_, value_heads_) != 0)
      fail("[", name_, "] expected q_num_heads and kv_num_heads of which one is a multiple of the ",
           "other, got ", query_heads_, " and ", value_heads_);
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const RecurrenceSizes sizes = checked(inputs);
    const Shape state{sizes.batches, value_heads_, sizes.key_size, sizes.value_size};
    if (is_given(inputs, kPastState) && !(inputs[kPastState].shape == state))
      fail("[", name_, "] expected past_state of shape ", to_string(state), ", got ",
           to_string(inputs[kPastState].shape));
    outputs[0] =
        Shape{sizes.batches, sizes.tokens, std::max(query_heads_, value_heads_) * sizes.value_size};
    if (outputs.size() > 1) outputs[1] = state;
  }

  std::size_t scratch_bytes(std::span<const Tensor> inputs) const override {
    return static_cast<std::size_t>(pool_->threads()) * bytes(sizes_of(inputs));
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> scratch) const override {
    const RecurrenceSizes sizes = sizes_of(inputs);
    pool_->run(sizes.batches * value_heads_, [&](std::int64_t task, std::size_t thread) {
      Scratch parts(scratch.data() + thread * bytes(sizes));
      attend(inputs, sizes, task, outputs, parts);
    });
  }

 private:
  RecurrenceSizes sizes_of(std::span<const Tensor> inputs) const {
    const Shape& query = inputs[kQuery].shape;
    const std::int64_t key_size = query[2] / query_heads_;
    return {.batches = query[0],
            .tokens = query[1],
            .key_heads = key_size == 0 ? 0 : inputs[kKey].shape[2] / key_size,
            .key_size = key_size,
            .value_size = inputs[kValue].shape[2] / value_heads_,
            .decays =
                is_gated_ && is_given(inputs, kDecay) ? inputs[kDecay].shape[2] / value_heads_ : 1};
  }

  RecurrenceSizes checked(std::span<const Tensor> inputs) const {
    const RecurrenceSizes sizes = sizes_of(inputs);
    const auto expect = [&](bool fits, const char* expected, std::size_t input) {
      if (!fits)
        fail("[", name_, "] expected ", expected, ", got ", to_string(inputs[input].shape));
    };
    expect(sizes.key_size > 0 && inputs[kQuery].shape[2] % query_heads_ == 0,
           "a query of q_num_heads heads", kQuery);
    expect(sizes.value_size > 0 && inputs[kValue].shape[2] % value_heads_ == 0,
           "a value of kv_num_heads heads", kValue);
    expect(sizes.key_heads > 0 && inputs[kKey].shape[2] % sizes.key_size == 0 &&
               value_heads_ % sizes.key_heads == 0,
           "a key with heads of the query's size, whose number divides kv_num_heads", kKey);
    if (is_gated_) {
      if (!is_given(inputs, kDecay)) fail("[", name_, "] expected decay, which its rule needs");
      const std::int64_t width = inputs[kDecay].shape[2];
      expect(width == value_heads_ || width == value_heads_ * sizes.key_size,
             "a decay for each head of the values, or for each row of their states", kDecay);
    }
    if (is_delta_) {
      if (!is_given(inputs, kBeta)) fail("[", name_, "] expected beta, which its rule needs");
      const std::int64_t width = inputs[kBeta].shape[2];
      expect(width == value_heads_ || width == 1, "a beta for each head of the values, or one",
             kBeta);
    }
    return sizes;
  }

  std::size_t bytes(const RecurrenceSizes& sizes) const {
    Scratch parts;
    parts.take<float>(sizes.key_size * sizes.value_size);
    parts.take<float>(sizes.key_size * kRecurrenceColumns);
    parts.take<float>(sizes.tokens * sizes.decays);
    return parts.bytes();
  }

  // All tokens of one sequence's head of values.
  void attend(std::span<const Tensor> inputs, const RecurrenceSizes& sizes, std::int64_t task,
              std::span<const Tensor> outputs, Scratch& parts) const {
    const std::int64_t head = task % value_heads_;
    const std::int64_t first_token = task / value_heads_ * sizes.tokens;
    const std::int64_t heads = std::max(query_heads_, value_heads_);
    const std::int64_t first_output = head * heads / value_heads_;
    const std::int64_t elements = sizes.key_size * sizes.value_size;
    const auto part = [&](std::size_t input, std::int64_t index) {
      return inputs[input].as<const float>() + first_token * inputs[input].shape[2] + index;
    };
    Recurrence call;
    call.key_size = sizes.key_size;
    call.value_size = sizes.value_size;
    call.tokens = sizes.tokens;
    call.scale = scale_ == 0 ? 1.0F / std::sqrt(static_cast<float>(sizes.key_size)) : scale_;
    call.queries = heads / value_heads_;
    call.query = part(kQuery, first_output * query_heads_ / heads * sizes.key_size);
    call.query_stride = inputs[kQuery].shape[2];
    call.key = part(kKey, head * sizes.key_heads / value_heads_ * sizes.key_size);
    call.key_stride = inputs[kKey].shape[2];
    call.value = part(kValue, head * sizes.value_size);
    call.value_stride = inputs[kValue].shape[2];
    call.output_stride = heads * sizes.value_size;
    call.output =
        outputs[0].as<float>() + first_token * call.output_stride + first_output * sizes.value_size;
    if (is_delta_) {
      call.beta_stride = inputs[kBeta].shape[2];
      call.beta = part(kBeta, call.beta_stride == 1 ? 0 : head);
    }
    auto* state = parts.take<float>(elements);
    if (is_given(inputs, kPastState))
      call.past = wide_state(inputs[kPastState], task, elements, state);
    const bool has_state = outputs.size() > 1 && outputs[1].data != nullptr;
    const bool is_wide = has_state && outputs[1].type == DataType::kFloat32;
    call.present = is_wide ? outputs[1].as<float>() + task * elements : state;
    call.strip = parts.take<float>(sizes.key_size * kRecurrenceColumns);
    auto* factors = parts.take<float>(sizes.tokens * sizes.decays);
    std::fill_n(factors, sizes.tokens * sizes.decays, 1.0F);
    for (std::int64_t token = 0; is_gated_ && token < sizes.tokens; ++token) {
      kernels_.apply(Function::kExp,
                     part(kDecay, token * inputs[kDecay].shape[2] + head * sizes.decays),
                     factors + token * sizes.decays, sizes.decays);
    }
    call.decay = factors;
    call.decays = sizes.decays;
    kernels_.recurrence(call);
    if (has_state && !is_wide) {
      kernels_.store_cache(state, outputs[1].as<std::uint16_t>() + task * elements, outputs[1].type,
                           elements);
    }
  }

  // Head `task` of the states, in f32: in its place, or else in `memory`.
  const float* wide_state(const Tensor& states, std::int64_t task, std::int64_t elements,
                          float* memory) const {
    if (states.type == DataType::kFloat32) return states.as<const float>() + task * elements;
    kernels_.widen(states.as<const std::uint16_t>() + task * elements, states.type, memory,
                   elements);
    return memory;
  }

  std::shared_ptr<ThreadPool> pool_;
  const Kernels& kernels_;
  std::string name_;
  std::int64_t query_heads_;
  std::int64_t value_heads_;
  float scale_;
  bool is_gated_ = false;
  bool is_delta_ = false;
};

constexpr Port kInputs[] = {
    {.name = "query", .types = kFloats, .shape = "[B,T,?]", .type_letter = 'T'},
    {.name = "key", .types = kFloats, .shape = "[B,T,?]", .type_letter = 'T'},
    {.name = "value", .types = kFloats, .shape = "[B,T,?]", .type_letter = 'T'},
    optional({.name = "past_state", .types = kFloats, .shape = "[B,?,?,?]"}),
    optional({.name = "decay", .types = kFloats, .shape = "[B,T,?]"}),
    optional({.name = "beta", .types = kFloats, .shape = "[B,T,?]"})};
constexpr Port kOutputs[] = {
    {.name = "output", .types = kFloats, .shape = "[B,T,?]", .type_letter = 'T'},
    optional({.name = "present_state", .types = kFloats, .shape = "[B,?,?,?]"})};
// chunk_size says how a provider may cut a prompt; results do not depend on it.
constexpr AttributeRule kOnnxAttributes[] = {
    required(count("q_num_heads", 1)), required(count("kv_num_heads", 1)), number("scale"),
    text("update_rule", "linear|gated|delta|gated_delta"), integer("chunk_size")};
constexpr AttributeRule kAttributes[] = {required(count("q_num_heads", 1)),
                                         required(count("kv_num_heads", 1)),
                                         number("scale"),
                                         text("update_rule", "linear|gated|delta|gated_delta"),
                                         integer("chunk_size"),
                                         only("state_window", 0)};

// With copies in f32 of all inputs and outputs of 16 bits but the states.
std::unique_ptr<Step> make_linear_attention(const Node& node, const Context& context) {
  Node own = node;
  if (own.inputs.size() > kPastState) own.inputs[kPastState].type = DataType::kFloat32;
  if (own.outputs.size() > 1) own.outputs[1].type = DataType::kFloat32;
  return make_widened(own, context, make<LinearAttention>, kNoInput);
}

constexpr Operator kOperators[] = {
    {{"", "LinearAttention", 27, 27, kInputs, kOutputs, kOnnxAttributes}, make_linear_attention},
    {{"com.microsoft", "LinearAttention", 1, 1, kInputs, kOutputs, kAttributes},
     make_linear_attention}};

}  // namespace

std::span<const Operator> linear_attention_operators() { return kOperators; }

}  // namespace flownpu::cpu
