// SPDX-License-Identifier: Apache-2.0
// Where inputs and outputs of FlowQKVAttention and FlowKVAttention stand;
// ops/definitions/flow_qkv_attention.py says what they mean, ops/cpu/attention/step.cc that these
// are its names in its order.
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

// A row of an int8 KV cache is a head's codes and behind them their scale, an f32.
inline constexpr std::int64_t kInt8ScaleBytes = 4;
// Elements of a row of a KV cache of that type.
std::int64_t cache_columns(DataType type, std::int64_t head_size);
// Bytes of it.
std::int64_t cache_row_bytes(DataType type, std::int64_t head_size);

// Both take a row's bidirectional_blocks, which are not empty.

// Throws Error unless the numbers grow from one block to the next. `before`: of its message.
void check_block_numbers(std::span<const std::int32_t> numbers, std::string_view before,
                         std::int64_t row);
// How many tokens from the first on are in its block; 1 if it is in none.
std::int64_t tokens_of_block(std::span<const std::int32_t> numbers);

}  // namespace flownpu
