// SPDX-License-Identifier: Apache-2.0
// Where inputs and outputs of FlowQKVAttention and FlowKVAttention stand;
// ops/definitions/flow_qkv_attention.py says what they mean, ops/cpu/attention.cc that these are
// its names in its order.
#pragma once

#include <cstdint>

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

}  // namespace flownpu
