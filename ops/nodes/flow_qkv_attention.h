// SPDX-License-Identifier: Apache-2.0
// The schema of FlowQKVAttention and FlowKVAttention; ops/definitions/flow_qkv_attention.py has the
// equations. B batch, S new tokens, T tokens so far in the longest row, H query heads, G KV heads,
// d size of a head, P tokens that the past has room for, which may be 0.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string_view>

#include "ops/nodes/contract.h"
#include "ops/nodes/kv_cache.h"
#include "ops/nodes/tensor.h"

namespace flownpu {

// Inputs and attributes that PagedAttention has, too; R positions and A angles of the RoPE tables.
namespace attention {
inline constexpr Port kCosines = optional({.name = "cos_cache",
                                           .types = kFloat,
                                           .shape = "[R,A]",
                                           .meaning = "[positions, d/2], for do_rotary"});
inline constexpr Port kSines =
    optional({.name = "sin_cache", .types = kFloat, .shape = "[R,A]", .meaning = "like cos_cache"});
inline constexpr Port kQueryNorm =
    optional({.name = "q_norm_weight",
              .types = kFloat,
              .meaning = "[d], of an RMS norm of each query head before RoPE"});
inline constexpr Port kKeyNorm =
    optional({.name = "k_norm_weight",
              .types = kFloat,
              .meaning = "[d], likewise of each key head; only together"});
inline constexpr AttributeRule kNumHeads = required(count("num_heads", 1), "H, a multiple of G");
inline constexpr AttributeRule kKvNumHeads = required(count("kv_num_heads", 1), "G");
inline constexpr AttributeRule kHeadSize = required(integer("head_size", 1, kMaxHeadSize), "d");
inline constexpr AttributeRule kScale =
    optional(number("scale"), 0.0F, "the factor of the scores; 0: 1/sqrt(d)");
inline constexpr AttributeRule kSoftcap =
    optional(number("softcap"), 0.0F,
             "c of c tanh(score / c), by which scores are bounded; 0 and below: none");
inline constexpr AttributeRule kLocalWindowSize = optional(
    integer("local_window_size", -1, std::numeric_limits<std::int32_t>::max()), std::int64_t{-1},
    "how many keys, its own included, a query sees at the most; -1: all");
inline constexpr AttributeRule kDoRotary =
    optional(flag("do_rotary"), std::int64_t{0}, "1: RoPE of queries and keys by their positions");
inline constexpr AttributeRule kRotaryInterleaved =
    optional(flag("rotary_interleaved"), std::int64_t{0},
             "1: RoPE rotates neighbouring elements; 0: those half a head apart");
inline constexpr AttributeRule kQkNormEpsilon = optional(
    number("qk_norm_epsilon"), 1e-6F, "the epsilon of q_norm_weight's and k_norm_weight's norms");
}  // namespace attention

// In shapes G KV heads and D elements of a cache's rows.
// Token axes that are cut into slices with the prompt are '?'.
inline constexpr Port kAttentionPorts[] = {
    {.name = "query",
     .types = kFloat,
     .shape = "[B,?,?]",
     .meaning = "[B, S, H d]; without key and value [B, S, (H + 2 G) d], all three packed"},
    optional({.name = "key",
              .types = kFloat,
              .shape = "[B,?,K]",
              .meaning = "[B, S, G d]; [B, 0, G d] if the past holds all tokens already, as where "
                         "layers share their keys and values"}),
    optional({.name = "value", .types = kFloat, .shape = "[B,?,K]", .meaning = "[B, S, G d]"}),
    optional({.name = "past_key",
              .types = kCacheTypes,
              .shape = "[B,G,P,D]",
              .type_letter = 'C',
              .meaning =
                  "[B, G, P, d], in int8 [B, G, P, d + 4]: rows of codes followed by their scale"}),
    optional({.name = "past_value",
              .types = kCacheTypes,
              .shape = "[B,G,P,D]",
              .type_letter = 'C',
              .meaning = "like past_key"}),
    optional({.name = "seqlens_k",
              .types = kInt32,
              .meaning = "[B] or [B, 1], the tokens so far in each row less 1; a past needs it"}),
    optional({.name = "total_sequence_length",
              .types = kInt32,
              .meaning = "T, one element; without it and seqlens_k T = S in every row"}),
    attention::kCosines,
    attention::kSines,
    optional({.name = "position_ids",
              .types = kInt64,
              .meaning = "[B, S], each token's position; without it they count on from the cache"}),
    optional({.name = "attention_bias",
              .types = kFloat,
              .shape = "[?,?,?,?]",
              .meaning = "[B or 1, H or 1, S, T], added to the scores"}),
    attention::kQueryNorm,
    attention::kKeyNorm,
    optional({.name = "bidirectional_blocks",
              .types = kInt32,
              .shape = "[B,S]",
              .meaning =
                  "[B, S]: tokens with the same number above 0 see one another in both directions; "
                  "numbers grow from block to block"}),
    optional({.name = "head_sink",
              .types = kFloat,
              .shape = "[H]",
              .meaning =
                  "[H], the score of one more key, with value 0, that every query of a head sees"}),
};
inline constexpr Port kAttentionResults[] = {
    {.name = "output", .types = kFloat, .meaning = "[B, S, H d]"},
    optional(
        {.name = "present_key",
         .types = kCacheTypes,
         .type_letter = 'C',
         .meaning =
             "[B, G, max(P, T), d], with sliding_window_cache [B, G, P, d], in past_key's type "
             "(float32 without one), with the new keys appended"}),
    optional({.name = "present_value",
              .types = kCacheTypes,
              .type_letter = 'C',
              .meaning = "likewise of the values"}),
};

inline constexpr AttributeRule kAttentionAttributes[] = {
    attention::kNumHeads,
    attention::kKvNumHeads,
    attention::kHeadSize,
    attention::kScale,
    attention::kSoftcap,
    attention::kLocalWindowSize,
    optional(flag("causal"), std::int64_t{1}, "0: queries see all keys"),
    attention::kDoRotary,
    attention::kRotaryInterleaved,
    attention::kQkNormEpsilon,
    optional(flag("sliding_window_cache"), std::int64_t{0},
             "1: the cache holds only the newest tokens, at most P of them"),
    optional(flag("counted_prompt"), std::int64_t{0},
             "1: the rows of a first prompt count on from position_ids[0, 0]"),
};

inline constexpr Contract kFlowQKVAttention{
    kDomain, "FlowQKVAttention", 1, 1, kAttentionPorts, kAttentionResults, kAttentionAttributes};
inline constexpr Contract kFlowKVAttention{
    kDomain, "FlowKVAttention", 1, 1, kAttentionPorts, kAttentionResults, kAttentionAttributes};

enum AttentionInput : std::uint8_t {
  kQuery = position(kAttentionPorts, "query"),
  kKey = position(kAttentionPorts, "key"),
  kValue = position(kAttentionPorts, "value"),
  kPastKey = position(kAttentionPorts, "past_key"),
  kPastValue = position(kAttentionPorts, "past_value"),
  kSeqlensK = position(kAttentionPorts, "seqlens_k"),
  kTotalSequenceLength = position(kAttentionPorts, "total_sequence_length"),
  kCosCache = position(kAttentionPorts, "cos_cache"),
  kSinCache = position(kAttentionPorts, "sin_cache"),
  kPositionIds = position(kAttentionPorts, "position_ids"),
  kAttentionBias = position(kAttentionPorts, "attention_bias"),
  kQNormWeight = position(kAttentionPorts, "q_norm_weight"),
  kKNormWeight = position(kAttentionPorts, "k_norm_weight"),
  kBidirectionalBlocks = position(kAttentionPorts, "bidirectional_blocks"),
  kHeadSink = position(kAttentionPorts, "head_sink"),
};
enum AttentionOutput : std::uint8_t {
  kAttended = position(kAttentionResults, "output"),
  kPresentKey = position(kAttentionResults, "present_key"),
  kPresentValue = position(kAttentionResults, "present_value"),
};

// Both functions take one row of bidirectional_blocks, which must not be empty.

// Throws Error unless the numbers grow from one block to the next. `before` begins its message.
void check_block_numbers(std::span<const std::int32_t> numbers, std::string_view before,
                         std::int64_t row);
// The number of tokens, from the first one on, that are in the first token's block; 1 if it is in
// none.
std::int64_t tokens_of_block(std::span<const std::int32_t> numbers);

}  // namespace flownpu
