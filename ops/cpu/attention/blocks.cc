// SPDX-License-Identifier: Apache-2.0
// Bidirectional blocks of attention on the CPU: the tokens of a picture see one another in both
// directions. A block is a run of tokens, so each token still sees one range of keys. A block only
// moves the end of that range, and needs no mask.
#include "ops/cpu/attention/step.h"
#include "ops/nodes/flow_qkv_attention.h"

namespace flownpu::cpu {

// The first slice of a prompt checks the numbers of all slices, before any slice has changed the
// cache.
void FlowQKVAttention::check_block_numbers(const AttentionCall& call) const {
  const Tensor& blocks = call.input(kBidirectionalBlocks);
  if (!blocks.present() || call.first_token > 0) return;
  for (std::int64_t b = 0; b < call.batch; ++b) {
    const auto* numbers = blocks.as<const std::int32_t>() + b * call.prompt_tokens;
    flownpu::check_block_numbers({numbers, static_cast<std::size_t>(call.prompt_tokens)},
                                 "[" + attributes_.name + "] ", b);
  }
}

// One token is a block of its own, and with causal = 0 all see one another anyway.
void FlowQKVAttention::take_seen_tokens(Scratch& scratch, AttentionCall& call) const {
  if (!call.input(kBidirectionalBlocks).present() || call.tokens == 1 || !attributes_.causal)
    return;
  call.seen_tokens = scratch.take<std::int32_t>(call.batch * call.tokens);
}

void FlowQKVAttention::find_seen_tokens(AttentionCall& call) const {
  if (call.seen_tokens == nullptr) return;
  for (std::int64_t b = 0; b < call.batch; ++b) {
    const auto* blocks = call.input(kBidirectionalBlocks).as<const std::int32_t>() +
                         b * call.prompt_tokens + call.first_token;
    const std::int64_t tokens = row_of(call, b).tokens;
    std::int32_t* seen = call.seen_tokens + b * call.tokens;
    for (std::int64_t token = tokens - 1; token >= 0; --token) {
      const bool goes_on =
          token + 1 < tokens && blocks[token] > 0 && blocks[token] == blocks[token + 1];
      seen[token] = goes_on ? seen[token + 1] : static_cast<std::int32_t>(token + 1);
    }
  }
}

}  // namespace flownpu::cpu
