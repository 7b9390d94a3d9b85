// SPDX-License-Identifier: Apache-2.0
// The positions of the inputs and outputs of FlowQKVAttention and FlowKVAttention.
// ops/definitions/flow_qkv_attention.py says what they mean; the contracts in
// ops/cpu/attention/step.cc list the same names in this order.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "ops/nodes/tensor.h"

namespace flownpu {

enum AttentionInput : std::uint8_t {
  kQuery,
  kKey,
  kValue,
  kPastKey,
  kPastValue,
  kSeqlensK,
  kTotalSequenceLength,
  kCosCache,
  kSinCache,
  kPositionIds,
  kAttentionBias,
  kQNormWeight,
  kKNormWeight,
  kBidirectionalBlocks,
  kHeadSink,
  kAttentionInputs,
};
enum AttentionOutput : std::uint8_t { kOutput, kPresentKey, kPresentValue };

// A row of an int8 KV cache is a head's codes followed by their scale, an f32.
inline constexpr std::int64_t kInt8ScaleBytes = 4;
// The number of elements in a row of a KV cache of that type.
std::int64_t cache_columns(DataType type, std::int64_t head_size);
// The size of such a row in bytes.
std::int64_t cache_row_bytes(DataType type, std::int64_t head_size);

// Both functions take one row of bidirectional_blocks, which must not be empty.

// Throws Error unless the numbers grow from one block to the next. `before` begins its message.
void check_block_numbers(std::span<const std::int32_t> numbers, std::string_view before,
                         std::int64_t row);
// The number of tokens, from the first one on, that are in the first token's block; 1 if it is in
// none.
std::int64_t tokens_of_block(std::span<const std::int32_t> numbers);

}  // namespace flownpu
