// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/attention/step.h"

#include <algorithm>
#include <cmath>

#include "ops/error.h"
#include "ops/system/processors.h"

namespace flownpu::cpu {

AttentionCall::AttentionCall(std::span<const Tensor> inputs, std::span<const Tensor> outputs)
    : inputs(inputs), outputs(outputs) {
  const Tensor& query = inputs[kQuery];
  batch = query.shape[0];
  tokens = query.shape[1];
  first_token = query.slice.first;
  prompt_tokens = query.slice.tokens > 0 ? query.slice.tokens : tokens;
}

const Tensor& AttentionCall::input(AttentionInput index) const {
  static const Tensor absent;
  return index < inputs.size() ? inputs[index] : absent;
}

FlowQKVAttention::FlowQKVAttention(const Node& node, const Context& context)
    : context_(context),
      attributes_(node),
      keeps_present_(node.has_output(kPresentKey) && node.has_output(kPresentValue)),
      writes_present_(node.has_output(kPresentKey) || node.has_output(kPresentValue)),
      cache_bytes_(second_level_cache_bytes()) {
  check_inputs(node, attributes_);
  for (const AttentionOutput present : {kPresentKey, kPresentValue}) {
    if (node.has_output(present)) cache_type_ = node.outputs[present].type;
  }
  if (const Value* past = node.input(kPastKey); past != nullptr) cache_type_ = past->type;
  // Without a cache, keys and values live only during the call, in bf16 if kernels multiply bf16
  // faster.
  const bool cached = node.has_output(kPresentKey) || node.has_output(kPresentValue) ||
                      node.input(kPastKey) != nullptr;
  constexpr auto kPairs = DataType::kBFloat16;
  if (!cached && context.kernels.attention_element(attributes_.head_size, kPairs) == 2)
    cache_type_ = kPairs;
}

std::int64_t FlowQKVAttention::multiply_adds() const {
  return attention_multiply_adds(attributes_);
}

std::optional<Slicing> FlowQKVAttention::slicing(const Node& /*node*/) const {
  if (!attributes_.causal || !keeps_present_) return std::nullopt;
  Slicing slicing{.inputs = {kQuery, kKey, kValue},
                  .outputs = {kAttended},
                  .holds_tokens = true,
                  .blocks = {kBidirectionalBlocks}};
  // With counted_prompt every slice needs the prompt's first position, so position_ids is not
  // sliced.
  if (!attributes_.counted_prompt) slicing.inputs.push_back(kPositionIds);
  return slicing;
}

AttentionCall FlowQKVAttention::describe(std::span<const Tensor> inputs,
                                         std::span<const Tensor> outputs) const {
  AttentionCall call(inputs, outputs);
  if (const Tensor& past = call.input(kPastKey); past.present()) call.past_capacity = past.shape[2];
  const Tensor& total = call.input(kTotalSequenceLength);
  const std::int64_t most = call.past_capacity + (call.has_no_keys() ? 0 : call.prompt_tokens);
  call.total = total.present() ? *total.as<const std::int32_t>() : most;
  call.capacity = attributes_.window_sized_cache ? call.past_capacity
                                                 : std::max(call.past_capacity, call.total);
  call.cache_type = cache_type_;
  call.row_bytes = cache_row_bytes(cache_type_, attributes_.head_size);
  return call;
}

void FlowQKVAttention::plan(AttentionCall& call) const {
  const Kernels& kernels = context_.kernels;
  AttentionShape shape{call.batch,
                       attributes_.kv_heads,
                       attributes_.heads_per_group(),
                       attributes_.head_size,
                       call.tokens,
                       call.total,
                       attributes_.window,
                       call.row_bytes};
  const AttentionMachine machine{context_.pool->threads(), cache_bytes_, kernels.few_rows,
                                 kernels.block_rows,
                                 kernels.attention_element(attributes_.head_size, call.cache_type)};
  call.plan = plan_attention(shape, machine);
  shape.total = std::max(call.total, call.capacity);
  const AttentionPlan most = plan_attention(shape, machine);
  call.most_parts = std::max(call.plan.parts, most.parts);
}

void FlowQKVAttention::infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const {
  check_shapes(inputs);
  const AttentionCall call = describe(inputs, {});
  check_lengths(call);
  outputs[kAttended] = Shape{call.batch, call.tokens, attributes_.heads * attributes_.head_size};
  for (std::size_t i = kPresentKey; i < outputs.size(); ++i) {
    outputs[i] = Shape{call.batch, attributes_.kv_heads, call.capacity,
                       cache_columns(call.cache_type, attributes_.head_size)};
  }
}

void FlowQKVAttention::take(Scratch& scratch, AttentionCall& call) const {
  take_tiles(scratch, call);
  take_states(scratch, call);
  take_staged(scratch, call);
  take_seen_tokens(scratch, call);
}

std::size_t FlowQKVAttention::scratch_bytes(std::span<const Tensor> inputs) const {
  AttentionCall call = describe(inputs, {});
  plan(call);
  Scratch scratch;
  take(scratch, call);
  return scratch.bytes();
}

void FlowQKVAttention::run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
                           std::span<std::byte> memory) const {
  AttentionCall call = describe(inputs, outputs);
  plan(call);
  Scratch scratch(memory.data());
  take(scratch, call);
  find_seen_tokens(call);

  if (!call.has_no_keys()) append(call);
  attend(call);
  if (call.staged() && writes_present_) {
    context_.pool->run(call.batch * attributes_.kv_heads, [&](std::int64_t task) {
      compact(call, task / attributes_.kv_heads, task % attributes_.kv_heads);
    });
  }
  clear_rest(call);
}

}  // namespace flownpu::cpu
