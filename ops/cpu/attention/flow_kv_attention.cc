// SPDX-License-Identifier: Apache-2.0
// FlowKVAttention on the CPU (Gemma3 paper, section 3.2.2): FlowQKVAttention for one token. Reading
// the KV cache once takes most of its time.
//
// One token makes fewer tiles of queries than there are threads. So the keys are cut into parts,
// with a task for each, and eq. 9-12 merge the parts' states (m, l, Y). A few tokens after a long
// context are computed the same way; plan.h decides what is cut.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "ops/cpu/attention/step.h"
#include "ops/error.h"

namespace flownpu::cpu {
namespace {

// Maximum, denominator, numerator [d].
std::int64_t state_floats(const AttentionAttributes& attributes) {
  return 2 + attributes.head_size;
}

}  // namespace

KeyRange part_of(KeyRange keys, std::int64_t part, std::int64_t parts) {
  const auto cut = [&](std::int64_t index) {
    if (index == parts) return keys.end;
    const std::int64_t at = (keys.end - keys.begin) * index / parts;
    return keys.begin + at / kAttentionKeyStep * kAttentionKeyStep;
  };
  return {cut(part), cut(part + 1)};
}

void FlowQKVAttention::take_states(Scratch& scratch, AttentionCall& call) const {
  if (call.most_parts == 1) return;
  call.states = scratch.take<float>(call.batch * call.tokens * attributes_.heads * call.most_parts *
                                    state_floats(attributes_));
  call.parts_left = scratch.take<std::int32_t>(call.plan.tasks / call.plan.parts);
}

// Acquires and releases, so that the thread of the last part sees the writes of all other threads.
bool FlowQKVAttention::was_last_part(const AttentionCall& call, std::int64_t tile) {
  return std::atomic_ref(call.parts_left[tile]).fetch_sub(1, std::memory_order_acq_rel) == 1;
}

// States are [B][S][H][parts].
PartState FlowQKVAttention::part_state(const AttentionCall& call, std::int64_t batch,
                                       std::int64_t token, std::int64_t head,
                                       std::int64_t part) const {
  const std::int64_t row = (batch * call.tokens + token) * attributes_.heads + head;
  float* state = call.states + (row * call.plan.parts + part) * state_floats(attributes_);
  return {state, state + 1, state + 2};
}

// Merges in the order of the parts, so that the result does not depend on the threads.
void FlowQKVAttention::merge_head(const AttentionCall& call, std::int64_t batch, std::int64_t token,
                                  std::int64_t head) const {
  const std::int64_t d = attributes_.head_size;
  const auto state_of = [&](std::int64_t part) {
    return part_state(call, batch, token, head, part);
  };
  float maximum = -std::numeric_limits<float>::infinity();
  for (std::int64_t p = 0; p < call.plan.parts; ++p)
    maximum = std::max(maximum, *state_of(p).maximum);
  float* out = output_row(call, batch, token, head);
  std::fill_n(out, d, 0.0F);
  float denominator = 0;
  for (std::int64_t p = 0; p < call.plan.parts; ++p) {
    const PartState state = state_of(p);
    if (*state.denominator == 0) continue;
    const float correction = std::exp(*state.maximum - maximum);
    denominator += correction * *state.denominator;
    for (std::int64_t i = 0; i < d; ++i) out[i] += correction * state.numerator[i];
  }
  divide(out, denominator_of(call, head, maximum, denominator), d);
}

namespace {

class FlowKVAttention final : public FlowQKVAttention {
 public:
  using FlowQKVAttention::FlowQKVAttention;

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    FlowQKVAttention::infer(inputs, outputs);
    if (inputs[kQuery].shape[1] != 1) {
      fail("[", attributes().name, "] expected one token, got ", inputs[kQuery].shape[1],
           ": use FlowQKVAttention for several");
    }
  }
};

}  // namespace

std::span<const Operator> flow_kv_attention_operators() {
  static const Operator kOperators[] = {
      {kFlowKVAttention,
       [](const Node& node, const Context& context) -> std::unique_ptr<Step> {
         return std::make_unique<FlowKVAttention>(node, context);
       }},
  };
  return kOperators;
}

}  // namespace flownpu::cpu
