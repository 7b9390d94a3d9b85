// SPDX-License-Identifier: Apache-2.0
#include "ops/transformer/decoder_call.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "ops/error.h"
#include "ops/nodes/flow_qkv_attention.h"

namespace flownpu::transformer {
namespace {

// The inputs after the pasts; null where the decoder has no such input.
struct OptionalInputs {
  const Tensor* blocks = nullptr;
  const Tensor* position_ids = nullptr;
  std::span<const Tensor> masks;
  std::span<const Tensor> tables;
};

OptionalInputs optional_inputs(const Decoder& decoder, std::span<const Tensor> inputs) {
  std::size_t next = kFirstPast + 2 * decoder.attentions();
  const auto take = [&](bool given) { return given ? &inputs[next++] : nullptr; };
  OptionalInputs found;
  found.blocks = take(decoder.attention().bidirectional_blocks);
  found.position_ids = take(decoder.position_ids);
  found.masks = inputs.subspan(next, decoder.masks());
  next += found.masks.size();
  if (decoder.given_tables)
    found.tables = inputs.subspan(next, 2 * static_cast<std::size_t>(decoder.tables()));
  return found;
}

// Throws Unsupported unless the mask [1 or B, 1 or H, S, T] leaves each token all keys of its
// window (0: all) up to its own; attention is causal, and has the window, without it.
void check_mask(const Tensor& mask, std::int64_t window, const SequenceTokens& tokens) {
  const std::int64_t given = mask.shape[2];
  const std::int64_t keys = mask.shape[3];
  const auto* values = mask.as<const float>();
  for (std::int64_t row = 0; row < mask.shape.elements() / keys; ++row) {
    const std::int64_t token = row % given;
    if (token >= tokens.count) continue;
    const std::int64_t seen = tokens.past + token + 1;
    const float* first = values + row * keys;
    const float* end = first + seen;
    const float* begin = window == 0 ? first : end - std::min(window, seen);
    const float* other = std::find_if(begin, end, [](float value) { return value != 0; });
    if (other == end) continue;
    flownpu::unsupported(
        "expected an attention_bias of 0 for ",
        window == 0 ? "all keys up to a token's own"
                    : "the last " + std::to_string(window) + " keys up to a token's own",
        ", got ", *other, " for the token at position ", seen - 1, " and the key at ",
        other - first,
        ": give texts without padding, no longer than the model's window, or set the "
        "provider option on_unsupported to cpu");
  }
}

// Checks each mask once for each window of the layers that have it.
void check_masks(const Decoder& decoder, std::span<const Tensor> masks,
                 const SequenceTokens& tokens) {
  std::vector<std::pair<std::int64_t, std::int64_t>> checked{{0, 0}};
  for (std::size_t layer = 0; layer < decoder.attentions(); ++layer) {
    const Attention& attention = decoder.attention(layer);
    const std::pair found{attention.mask, attention.window};
    if (attention.mask == 0 || std::ranges::find(checked, found) != checked.end()) continue;
    check_mask(masks[static_cast<std::size_t>(attention.mask - 1)], attention.window, tokens);
    checked.push_back(found);
  }
}

}  // namespace

std::span<const Tensor> given_tables(const Decoder& decoder, std::span<const Tensor> inputs) {
  return optional_inputs(decoder, inputs).tables;
}

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
  const OptionalInputs optional = optional_inputs(decoder, inputs);
  const auto check_numbers = [&](const char* name, const Tensor* numbers) {
    if (numbers == nullptr || numbers->shape == Shape{hidden[0], hidden[1]}) return;
    fail("expected ", name, " of shape [", hidden[0], ", ", hidden[1], "], got ",
         to_string(numbers->shape));
  };
  check_numbers("bidirectional_blocks", optional.blocks);
  check_numbers("position_ids", optional.position_ids);
  const std::int64_t total = *inputs[kTotalTokens].as<std::int32_t>();
  for (const Tensor& mask : optional.masks) {
    if (mask.shape.rank() == 4 && mask.shape[2] == hidden[1] && mask.shape[3] >= total) continue;
    fail("expected attention_bias of shape [batch, heads, ", hidden[1], ", ", total,
         " or more], got ", to_string(mask.shape));
  }
  const std::int64_t turned =
      decoder.partly_rotated() ? decoder.rotated_size : decoder.attention().head_size;
  for (const Tensor& table : optional.tables) {
    const Shape& first = optional.tables.front().shape;
    if (table.shape.rank() == 2 && table.shape[1] == turned / 2 && table.shape[0] == first[0])
      continue;
    fail("expected cos_cache and sin_cache of shape [positions, ", turned / 2, "], got ",
         to_string(first), " and ", to_string(table.shape));
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
  const OptionalInputs optional = optional_inputs(decoder, inputs);
  check_masks(decoder, optional.masks, tokens);
  if (optional.position_ids != nullptr) {
    const auto* ids = optional.position_ids->as<const std::int64_t>() + sequence * given;
    for (std::int64_t token = 1; token < tokens.count; ++token) {
      if (ids[token] == ids[token - 1] + 1) continue;
      flownpu::unsupported("expected position_ids that follow one another, got ", ids[token],
                           " after ", ids[token - 1],
                           ": give such, or set the provider option on_unsupported to cpu");
    }
    tokens.shift = ids[0] - tokens.past;
    if (tokens.shift < 0) {
      flownpu::unsupported("expected position_ids that are at least the tokens before them, got ",
                           ids[0], " after ", tokens.past,
                           " tokens: pad prompts on the right, or set the provider ",
                           "option on_unsupported to cpu");
    }
  }
  const std::int64_t positions =
      optional.tables.empty() ? decoder.positions : optional.tables.front().shape[0];
  if (length + tokens.shift > positions) {
    fail("expected positions below ", positions,
         ", which is what the model's RoPE tables hold, got ", length + tokens.shift - 1,
         ": shorten the context");
  }
  return tokens;
}

void infer_outputs(const Decoder& decoder, std::span<const Tensor> inputs,
                   std::span<Shape> outputs) {
  const std::int64_t batch = inputs[kHidden].shape[0];
  const std::int64_t total = *inputs[kTotalTokens].as<std::int32_t>();
  outputs[kLogits] =
      Shape{batch, decoder.all_logits ? inputs[kHidden].shape[1] : 1, decoder.vocabulary};
  for (std::size_t part = 0; part < 2 * decoder.attentions(); ++part) {
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
  std::size_t next = kFirstPresent + 2 * decoder.attentions();
  for (const Layer& layer : decoder.layers)
    for (Shape state : decoder.states_of(layer)) {
      state[0] = batch;
      outputs[next++] = state;
    }
}

std::size_t count_of_state_constants(const Layer& layer) {
  constexpr std::size_t kOfDelta = 6;  // taps, a, b, time bias, decay scale, norm
  if (layer.has_attention()) return 0;
  return std::holds_alternative<GatedDelta>(layer.mixer) ? kOfDelta : 1;
}

std::size_t count_of_state_inputs(const Decoder& decoder) {
  std::size_t count = decoder.has_states() ? 1 : 0;
  for (const Layer& layer : decoder.layers)
    count += count_of_state_constants(layer) + decoder.states_of(layer).size();
  return count;
}

void check_tokens_of_states(const Tensor& is_token, std::int64_t sequence, std::int64_t count) {
  if (is_token.data == nullptr) return;
  const std::int64_t given = is_token.shape[1];
  const auto* mask = is_token.as<const float>() + sequence * given;
  if (given < count || std::any_of(mask, mask + count, [](float value) { return value != 1; }))
    flownpu::unsupported(
        "expected ", count, " tokens before all padding, got a mask that hides one of them",
        ": pad prompts on the right, or set the provider option on_unsupported to cpu");
}

}  // namespace flownpu::transformer
