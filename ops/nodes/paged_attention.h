// SPDX-License-Identifier: Apache-2.0
// The schema of PagedAttention; ops/definitions/paged_attention.py has the equations. N new tokens,
// B sequences, P blocks of S rows, M blocks of a sequence, H query heads, G KV heads, d size of a
// head.
#pragma once

#include <cstdint>

#include "ops/nodes/contract.h"
#include "ops/nodes/flow_qkv_attention.h"

namespace flownpu {

// In shapes L is B + 1 and D a head's elements.
inline constexpr Port kPagedPorts[] = {
    {.name = "query",
     .types = kFloat,
     .shape = "[N,Q]",
     .meaning = "[N, (H + 2 G) d], packed queries, keys and values"},
    {.name = "key_cache",
     .types = kFloats,
     .shape = "[P,S,G,D]",
     .type_letter = 'C',
     .meaning = "[P, S, G, d]"},
    {.name = "value_cache",
     .types = kFloats,
     .shape = "[P,S,G,D]",
     .type_letter = 'C',
     .meaning = "[P, S, G, d]"},
    {.name = "cumulative_sequence_lengths",
     .types = kInt32,
     .shape = "[L]",
     .meaning = "[B + 1]: c, from 0 to N; tokens c[b] to c[b + 1] - 1 are those of sequence b"},
    {.name = "past_sequence_lengths",
     .types = kInt32,
     .shape = "[B]",
     .meaning = "[B], the tokens of each sequence that are in the cache already"},
    {.name = "block_table",
     .types = kInt32,
     .shape = "[B,M]",
     .meaning = "[B, M], each sequence's blocks; entries behind its last block are ignored"},
    attention::kCosines,
    attention::kSines,
    shaped(attention::kQueryNorm, "[D]"),
    shaped(attention::kKeyNorm, "[D]"),
};
inline constexpr Port kPagedResults[] = {
    {.name = "output", .types = kFloat, .meaning = "[N, H d]"},
    {.name = "key_cache_out",
     .types = kFloats,
     .type_letter = 'C',
     .meaning = "key_cache with the new rows; may be bound to its memory"},
    {.name = "value_cache_out",
     .types = kFloats,
     .type_letter = 'C',
     .meaning = "likewise of value_cache"},
};
inline constexpr AttributeRule kPagedAttributes[] = {
    attention::kNumHeads, attention::kKvNumHeads,        attention::kHeadSize,
    attention::kScale,    attention::kSoftcap,           attention::kLocalWindowSize,
    attention::kDoRotary, attention::kRotaryInterleaved, attention::kQkNormEpsilon,
};
inline constexpr Contract kPagedAttention{kDomain,       "PagedAttention", 1, 1, kPagedPorts,
                                          kPagedResults, kPagedAttributes};

enum PagedInput : std::uint8_t {
  kPagedQuery = position(kPagedPorts, "query"),
  kKeyCache = position(kPagedPorts, "key_cache"),
  kValueCache = position(kPagedPorts, "value_cache"),
  kCumulativeSequenceLengths = position(kPagedPorts, "cumulative_sequence_lengths"),
  kPastSequenceLengths = position(kPagedPorts, "past_sequence_lengths"),
  kBlockTable = position(kPagedPorts, "block_table"),
  kPagedCosCache = position(kPagedPorts, "cos_cache"),
  kPagedSinCache = position(kPagedPorts, "sin_cache"),
  kPagedQNormWeight = position(kPagedPorts, "q_norm_weight"),
  kPagedKNormWeight = position(kPagedPorts, "k_norm_weight"),
};
enum PagedOutput : std::uint8_t {
  kPagedOutput = position(kPagedResults, "output"),
  kKeyCacheOut = position(kPagedResults, "key_cache_out"),
  kValueCacheOut = position(kPagedResults, "value_cache_out"),
};

}  // namespace flownpu
