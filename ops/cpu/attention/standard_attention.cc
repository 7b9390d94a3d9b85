// SPDX-License-Identifier: Apache-2.0
// ONNX's Attention by the kernels of FlowQKVAttention, in float32, or in bfloat16 where the model
// allows that precision. A mask of another shape or type is copied first; with a cache, so is what
// is in another layout.
//
//   Q, Y float32 [B, S, H d] or [B, H, S, d];  K, V likewise with G heads and, where there is a
//   cache, as many tokens;  attn_mask bool or float32 that broadcasts to [B, H, S, T];  past and
//   present [B, G, T, d]
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <string>

#include "ops/cpu/attention/step.h"
#include "ops/cpu/attention/whole_attention.h"
#include "ops/cpu/integers.h"
#include "ops/cpu/widened.h"
#include "ops/error.h"

namespace flownpu::cpu {
namespace {

constexpr Port kInputs[] = {
    {.name = "Q", .types = kFloats, .type_letter = 'T'},
    {.name = "K", .types = kFloats, .type_letter = 'T'},
    {.name = "V", .types = kFloats, .type_letter = 'T'},
    optional(
        {.name = "attn_mask",
         .types = {DataType::kFloat32, DataType::kFloat16, DataType::kBFloat16, DataType::kBool}}),
    optional({.name = "past_key", .types = kFloats, .shape = "[B,G,P,D]", .type_letter = 'T'}),
    optional({.name = "past_value", .types = kFloats, .shape = "[B,G,P,D]", .type_letter = 'T'}),
    optional({.name = "nonpad_kv_seqlen", .types = kNone})};
constexpr Port kOutputs[] = {
    {.name = "Y", .types = kFloats, .type_letter = 'T'},
    optional({.name = "present_key", .types = kFloats, .type_letter = 'T'}),
    optional({.name = "present_value", .types = kFloats, .type_letter = 'T'}),
    optional({.name = "qk_matmul_output", .types = kNone})};
// softmax_precision: a TensorProto's type, of which float32 is at least as precise as float16 and
// bfloat16.
constexpr std::int64_t kBFloat16Precision = 16;
constexpr AttributeRule kAttributes[] = {flag("is_causal"),
                                         count("kv_num_heads", 1),
                                         count("q_num_heads", 1),
                                         integer("qk_matmul_output_mode", 0, 3),
                                         number("scale"),
                                         number("softcap"),
                                         integer("softmax_precision", 1, kBFloat16Precision)};
enum Input : std::uint8_t {
  kQ = position(kInputs, "Q"),
  kK = position(kInputs, "K"),
  kV = position(kInputs, "V"),
  kMask = position(kInputs, "attn_mask"),
  kPast = position(kInputs, "past_key"),
};

// A tensor [B, A, C, d] as [B, C, A, d].
void swap_axes(const Shape& shape, const float* x, float* y, const Context& context) {
  const std::int64_t d = shape[3];
  context.pool->run_rows(shape[0] * shape[2], [&](std::int64_t row) {
    const std::int64_t batch = row / shape[2];
    const std::int64_t place = row % shape[2];
    for (std::int64_t i = 0; i < shape[1]; ++i)
      std::copy_n(x + ((batch * shape[1] + i) * shape[2] + place) * d, d,
                  y + (row * shape[1] + i) * d);
  });
}

class StandardAttention final : public Step {
 public:
  StandardAttention(const Node& node, const Context& context)
      : context_(context), name_(to_string(node)) {
    const auto shape_of = [&](Input input) {
      const Value& value = node.inputs[input];
      if (!value.shape || (value.shape->rank() != 3 && value.shape->rank() != 4))
        fail("[", name_, "] expected Q, K and V of 3 or 4 axes");
      return *value.shape;
    };
    const Shape query = shape_of(kQ);
    is_by_head_ = query.rank() == 4;
    heads_ = is_by_head_ ? query[1] : node.required_integer("q_num_heads");
    groups_ = is_by_head_ ? shape_of(kK)[1] : node.required_integer("kv_num_heads");
    const std::int64_t width = is_by_head_ ? query[3] * heads_ : query[2];
    if (heads_ <= 0 || groups_ <= 0 || width <= 0 || width % heads_ != 0)
      fail("[", name_, "] expected heads whose number and size are known, got Q of ",
           to_string(query));
    head_size_ = width / heads_;
    has_present_ = {node.has_output(1), node.has_output(2)};
    const bool is_cached = has_present_[0] || has_present_[1] || node.input(kPast) != nullptr;
    for (const Input input : {kK, kV}) {
      const Shape shape = shape_of(input);
      const std::int64_t expected = is_by_head_ ? head_size_ : groups_ * head_size_;
      const int tokens = is_by_head_ ? 2 : 1;
      if (shape.rank() != query.rank() || shape[-1] != expected)
        fail("[", name_, "] expected heads of ", head_size_, " elements in Q, K and V, got ",
             to_string(query), " and ", to_string(shape));
      const bool is_known = shape[tokens] >= 0 && query[tokens] >= 0;
      if (is_cached && is_known && shape[tokens] != query[tokens])
        fail("[", name_, "] expected as many tokens in K and V as in Q, got ", to_string(shape),
             " and ", to_string(query));
    }
    if (node.attributes.contains("scale") && node.number("scale", 1) == 0)
      fail("[", name_, "] expected a scale other than 0");
    multiply_adds_ = attention_multiply_adds(AttentionAttributes(kernel_node(node)));
    if (!is_cached) {
      const float scale = node.number("scale", 0);
      whole_ = std::make_unique<WholeAttention>(
          context, scale != 0 ? scale : 1 / std::sqrt(static_cast<float>(head_size_)),
          node.number("softcap", 0), node.integer("is_causal", 0) != 0,
          node.integer("softmax_precision", 1) == kBFloat16Precision);
      return;
    }
    step_ = std::make_unique<FlowQKVAttention>(kernel_node(node), context);
  }

  std::int64_t multiply_adds() const override { return multiply_adds_; }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    check(inputs);
    if (whole_) {
      outputs[0] = inputs[kQ].shape;
      if (is_given(inputs, kMask)) bias_shape(inputs);
      return;
    }
    step_->infer(Call(*this, inputs, nullptr).inputs, outputs);
    outputs[0] = inputs[kQ].shape;
  }

  std::size_t scratch_bytes(std::span<const Tensor> inputs) const override {
    if (whole_) {
      Scratch scratch;
      take_bias(inputs, scratch);
      return scratch.bytes() + whole_->scratch_bytes(sizes_of(inputs));
    }
    const Call call(*this, inputs, nullptr);
    return call.bytes + step_->scratch_bytes(call.inputs);
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> scratch) const override {
    if (whole_) return run_whole(inputs, outputs[0], scratch.data());
    const Call call(*this, inputs, scratch.data());
    if (is_by_head_) {
      for (const Input input : {kQ, kK, kV})
        swap_axes(inputs[input].shape, inputs[input].as<const float>(),
                  call.inputs[input].as<float>(), context_);
    }
    if (call.bias != nullptr) fill_bias(inputs[kMask], call.inputs[kAttentionBias], call.bias);
    const Shape& query = call.inputs[kQuery].shape;
    std::array<Tensor, 3> results{};
    std::copy_n(outputs.begin(), std::min(outputs.size(), results.size()), results.begin());
    if (is_by_head_) results[0].data = call.output;
    results[0].shape = query;
    for (const std::size_t present : {kPresentKey, kPresentValue}) {
      if (results[present].data == nullptr)
        results[present] = {.data = call.presents[present - 1], .shape = call.present};
    }
    step_->run(call.inputs, results, scratch.subspan(call.bytes));
    if (is_by_head_) {
      swap_axes({query[0], query[1], heads_, head_size_}, call.output, outputs[0].as<float>(),
                context_);
    }
  }

 private:
  // The inputs of FlowQKVAttention, and where they are copied to.
  struct Call {
    Call(const StandardAttention& step, std::span<const Tensor> given, std::byte* memory) {
      Scratch scratch(memory);
      const auto is_here = [&](std::size_t input) { return is_given(given, input); };
      for (const auto& [from, to] : {std::pair{kQ, kQuery}, {kK, kKey}, {kV, kValue}}) {
        inputs[to] = given[from];
        const Shape& shape = given[from].shape;
        if (!step.is_by_head_) continue;
        inputs[to].shape = Shape{shape[0], shape[2], shape[1] * shape[3]};
        auto* copy = scratch.take<float>(shape.elements());
        if (memory != nullptr) inputs[to].data = copy;
      }
      if (step.is_by_head_) output = scratch.take<float>(given[kQ].shape.elements());
      if (is_here(kPast)) {
        inputs[kPastKey] = given[kPast];
        inputs[kPastValue] = given[kPast + 1];
      }
      if (is_here(kMask)) {
        inputs[kAttentionBias] = given[kMask];
        inputs[kAttentionBias].type = DataType::kFloat32;
        inputs[kAttentionBias].shape = step.bias_shape(given);
        bias = step.take_bias(given, scratch);
        if (bias != nullptr) inputs[kAttentionBias].data = bias;
      }
      const Shape& query = inputs[kQuery].shape;
      const std::int64_t past = is_here(kPast) ? given[kPast].shape[2] : 0;
      present = Shape{query[0], step.groups_, past + query[1], step.head_size_};
      for (std::size_t i = 0; i < presents.size(); ++i) {
        if (!step.has_present_[i]) presents[i] = scratch.take<float>(present.elements());
      }
      bytes = scratch.bytes();
    }

    std::array<Tensor, std::size(kAttentionPorts)> inputs{};
    float* output = nullptr;
    float* bias = nullptr;
    // Keys and values so far, for those that are no outputs.
    Shape present;
    std::array<float*, 2> presents{};
    std::size_t bytes = 0;
  };

  Node kernel_node(const Node& node) const {
    Node made;
    made.name = node.name;
    made.op_type = "FlowQKVAttention";
    made.domain = kDomain;
    made.attributes = {{"num_heads", heads_},
                       {"kv_num_heads", groups_},
                       {"head_size", head_size_},
                       {"scale", node.number("scale", 0)},
                       {"softcap", node.number("softcap", 0)},
                       {"causal", node.integer("is_causal", 0)}};
    made.inputs.resize(std::size(kAttentionPorts));
    made.inputs[kQuery] = node.inputs[kQ];
    made.inputs[kKey] = node.inputs[kK];
    made.inputs[kValue] = node.inputs[kV];
    for (const std::size_t past : {std::size_t{kPast}, std::size_t{kPast} + 1}) {
      if (const Value* value = node.input(past); value != nullptr)
        made.inputs[kPastKey + past - kPast] = *value;
    }
    if (const Value* mask = node.input(kMask); mask != nullptr) made.inputs[kAttentionBias] = *mask;
    // With presents, keys and values stay float32.
    made.outputs.resize(3);
    for (Value& output : made.outputs) output.name = "given";
    return made;
  }

  // Memory for the mask as a bias of the kernels; null if it is one, or absent.
  float* take_bias(std::span<const Tensor> inputs, Scratch& scratch) const {
    if (!is_given(inputs, kMask)) return nullptr;
    const Shape shape = bias_shape(inputs);
    if (inputs[kMask].type != DataType::kBool && inputs[kMask].shape == shape) return nullptr;
    return scratch.take<float>(shape.elements());
  }

  std::int64_t tokens_of(const Tensor& heads) const { return heads.shape[is_by_head_ ? 2 : 1]; }

  WholeAttentionSizes sizes_of(std::span<const Tensor> inputs) const {
    return {inputs[kQ].shape[0],  heads_, groups_, head_size_, tokens_of(inputs[kQ]),
            tokens_of(inputs[kK])};
  }

  // The heads of Q, K, V or Y, of which there are `heads`.
  template <typename T>
  HeadRows<T> rows_of(const Tensor& tensor, std::int64_t heads) const {
    const std::int64_t tokens = tokens_of(tensor);
    const std::int64_t batch = tokens * heads * head_size_;
    if (is_by_head_) return {tensor.as<T>(), batch, tokens * head_size_, head_size_};
    return {tensor.as<T>(), batch, head_size_, heads * head_size_};
  }

  void run_whole(std::span<const Tensor> inputs, const Tensor& y, std::byte* memory) const {
    Scratch scratch(memory);
    WholeAttentionCall call{rows_of<const float>(inputs[kQ], heads_),
                            rows_of<const float>(inputs[kK], groups_),
                            rows_of<const float>(inputs[kV], groups_),
                            {},
                            rows_of<float>(y, heads_)};
    if (float* bias = take_bias(inputs, scratch); is_given(inputs, kMask)) {
      Tensor rows = inputs[kMask];
      rows.shape = bias_shape(inputs);
      if (bias != nullptr) fill_bias(inputs[kMask], rows, bias);
      const std::int64_t plane = rows.shape[2] * rows.shape[3];
      call.bias = {bias != nullptr ? bias : rows.as<const float>(),
                   rows.shape[0] == 1 ? 0 : rows.shape[1] * plane, rows.shape[1] == 1 ? 0 : plane,
                   rows.shape[3]};
    }
    whole_->run(sizes_of(inputs), call, memory + scratch.bytes());
  }

  void check(std::span<const Tensor> inputs) const {
    const int rank = is_by_head_ ? 4 : 3;
    for (const Input input : {kQ, kK, kV}) {
      const Shape& shape = inputs[input].shape;
      const std::int64_t heads = input == kQ ? heads_ : groups_;
      if (shape.rank() != rank || (is_by_head_ && (shape[1] != heads || shape[3] != head_size_)))
        fail("[", name_, "] expected ", heads, " heads of ", head_size_, " elements, got ",
             to_string(shape));
      if (whole_ && input == kV && tokens_of(inputs[kV]) != tokens_of(inputs[kK]))
        fail("[", name_, "] expected as many tokens in V as in K, got ", to_string(shape), " and ",
             to_string(inputs[kK].shape));
      if (!whole_ && tokens_of(inputs[input]) != tokens_of(inputs[kQ]))
        unsupported("[", name_, "] expected as many tokens in K and V as in Q, got ",
                    to_string(shape), " and ", to_string(inputs[kQ].shape),
                    ": set the provider option on_unsupported to cpu");
    }
  }

  // The mask's shape with S and T, [1 or B, 1 or H, S, T].
  Shape bias_shape(std::span<const Tensor> inputs) const {
    const Shape& mask = inputs[kMask].shape;
    const Shape& query = inputs[kQ].shape;
    const std::int64_t tokens = tokens_of(inputs[kQ]);
    const std::int64_t past = is_given(inputs, kPast) ? inputs[kPast].shape[2] : 0;
    Shape shape{1, 1, tokens, past + tokens_of(inputs[kK])};
    bool fits = mask.rank() >= 2 && mask.rank() <= 4;
    for (int axis = 1; fits && axis <= mask.rank(); ++axis) {
      const std::int64_t whole = axis == 4 ? query[0] : axis == 3 ? heads_ : shape[-axis];
      fits = mask[-axis] == 1 || mask[-axis] == whole;
      if (axis > 2) shape[-axis] = mask[-axis];
    }
    // ONNX also takes a mask of fewer keys, beyond which none is seen.
    if (!fits)
      unsupported("[", name_, "] expected a mask that broadcasts to [", query[0], ",", heads_, ",",
                  tokens, ",", shape[3], "], got ", to_string(mask),
                  ": set the provider option on_unsupported to cpu");
    return shape;
  }

  void fill_bias(const Tensor& mask, const Tensor& bias, float* y) const {
    const std::int64_t tokens = bias.shape[2];
    const std::int64_t keys = bias.shape[3];
    const std::int64_t key_step = mask.shape[-1] == 1 ? 0 : 1;
    const std::int64_t rows = mask.shape[-2];
    context_.pool->run_rows(bias.shape[0] * bias.shape[1] * tokens, [&](std::int64_t row) {
      const std::int64_t from =
          (row / tokens * rows + (rows == 1 ? 0 : row % tokens)) * mask.shape[-1];
      for (std::int64_t key = 0; key < keys; ++key) {
        const std::int64_t at = from + key * key_step;
        y[row * keys + key] = mask.type != DataType::kBool ? mask.as<const float>()[at]
                              : mask.as<const bool>()[at] ? 0.0F
                                                          : -std::numeric_limits<float>::infinity();
      }
    });
  }

  Context context_;
  std::string name_;
  bool is_by_head_ = false;
  std::int64_t heads_ = 0;
  std::int64_t groups_ = 0;
  std::int64_t head_size_ = 0;
  std::int64_t multiply_adds_ = 0;
  // Whether present_key and present_value are outputs.
  std::array<bool, 2> has_present_{};
  // Without a cache `whole_` computes, else `step_`.
  std::unique_ptr<WholeAttention> whole_;
  std::unique_ptr<Step> step_;
};

constexpr Operator kOperators[] = {
    {{"", "Attention", 23, 24, kInputs, kOutputs, kAttributes}, widened<make<StandardAttention>>}};

}  // namespace

std::span<const Operator> standard_attention_operators() { return kOperators; }

}  // namespace flownpu::cpu
