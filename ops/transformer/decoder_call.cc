// SPDX-License-Identifier: Apache-2.0
#include "ops/transformer/decoder_call.h"

#include <algorithm>

#include "ops/error.h"
#include "ops/nodes/flow_qkv_attention.h"

namespace flownpu::transformer {

void check_call(const Decoder& decoder, std::span<const Tensor> inputs) {
  const Shape& hidden = inputs[kHidden].shape;
  if (hidden.rank() != 3 || hidden[2] != decoder.hidden || hidden[0] < 1 || hidden[1] < 1) {
    fail("expected hidden states of shape [batch, tokens, ", decoder.hidden, "], got ",
         to_string(hidden));
  }
  if (inputs[kTotalTokens].shape.elements() != 1 ||
      inputs[kTokensBeforeLast].shape.elements() != hidden[0]) {
    fail("expected one total_sequence_length and ", hidden[0], " seqlens_k, got ",
         to_string(inputs[kTotalTokens].shape), " and ",
         to_string(inputs[kTokensBeforeLast].shape));
  }
  if (!decoder.attention().bidirectional_blocks) return;
  const Shape& blocks = inputs[kFirstPast + 2 * decoder.layers.size()].shape;
  if (!(blocks == Shape{hidden[0], hidden[1]})) {
    fail("expected bidirectional_blocks of shape [", hidden[0], ", ", hidden[1], "], got ",
         to_string(blocks));
  }
}

SequenceTokens tokens_of(const Decoder& decoder, std::span<const Tensor> inputs,
                         std::int64_t sequence) {
  const std::int64_t given = inputs[kHidden].shape[1];
  const std::int64_t total = *inputs[kTotalTokens].as<std::int32_t>();
  const std::int64_t length =
      std::int64_t{inputs[kTokensBeforeLast].as<std::int32_t>()[sequence]} + 1;
  SequenceTokens tokens;
  // GroupQueryAttention's rule: a call with as many tokens as there are so far is a first prompt.
  tokens.past = given == total ? 0 : length - given;
  tokens.count = length - tokens.past;
  if (tokens.past < 0 || tokens.count < 1 || tokens.count > given || length > total) {
    fail("expected seqlens_k + 1 between ", given, " and total_sequence_length = ", total, ", got ",
         length, length < 0 ? ": does attention_mask begin with 0? Pad prompts on the right" : "");
  }
  if (length > decoder.positions) {
    fail("expected positions below ", decoder.positions,
         ", which is what the model's RoPE tables hold, got ", length - 1, ": shorten the context");
  }
  return tokens;
}

void infer_outputs(const Decoder& decoder, std::span<const Tensor> inputs,
                   std::span<Shape> outputs) {
  const std::int64_t batch = inputs[kHidden].shape[0];
  const std::int64_t total = *inputs[kTotalTokens].as<std::int32_t>();
  outputs[kLogits] = Shape{batch, 1, decoder.vocabulary};
  for (std::size_t part = 0; part < 2 * decoder.layers.size(); ++part) {
    const Shape& past = inputs[kFirstPast + part].shape;
    const std::int64_t columns =
        cache_columns(inputs[kFirstPast + part].type, decoder.attention().head_size);
    const Attention& kind = decoder.attention(part / 2);
    if (past.rank() != 4 || past[0] != batch || past[1] != decoder.attention().kv_heads ||
        past[3] != columns) {
      fail("expected a past of shape [", batch, ",", decoder.attention().kv_heads, ",?,", columns,
           "] for layer ", part / 2, ", got ", to_string(past));
    }
    if (kind.window_sized_cache && past[2] < kind.window) {
      fail("expected a window-sized KV cache of at least ", kind.window, " positions for layer ",
           part / 2, ", got ", past[2],
           ": set past_present_share_buffer to true, or convert without it");
    }
    const std::int64_t capacity = kind.window_sized_cache ? past[2] : std::max(past[2], total);
    outputs[kFirstPresent + part] = Shape{batch, decoder.attention().kv_heads, capacity, columns};
  }
}

}  // namespace flownpu::transformer
