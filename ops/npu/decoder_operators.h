// SPDX-License-Identifier: Apache-2.0
// The operators that the layers of decoders and encoders are made of.
#pragma once

#include <cstdint>
#include <string_view>

#include "ops/node.h"

namespace flownpu::npu {

// Inputs of attention (docs/operators.md).
enum AttentionInput : std::uint8_t {
  kQuery,
  kKey,
  kValue,
  kPastKey,
  kPastValue,
  kLengths,
  kTotal,
  kCosine,
  kSine,
  kPositionIds,
  kAttentionBias,
  kQNorm,
  kKNorm,
  kBidirectionalBlocks,
  kHeadSink,
};
enum AttentionOutput : std::uint8_t { kOutput, kPresentKey, kPresentValue };

// Inputs of DenseMatMul and of Q4NXMatMul, after X and W.
enum ProductInput : std::uint8_t {
  kQ4NXBias = 2,
  kQ4NXResidual = 3,
  kDenseScale = 2,
  kDenseBias = 3,
  kDenseResidual = 4,
};

inline constexpr std::string_view kMicrosoft = "com.microsoft";

inline bool is(const Node& node, std::string_view domain, std::string_view op_type) {
  return node.domain == domain && node.op_type == op_type;
}
inline bool is_projection(const Node& node) {
  return is(node, kDomain, "Q4NXMatMul") || is(node, kDomain, "FusedDQP");
}
inline bool is_dense_product(const Node& node) { return is(node, kDomain, "DenseMatMul"); }
inline bool is_attention(const Node& node) {
  return is(node, kDomain, "FlowQKVAttention") || is(node, kDomain, "FlowKVAttention");
}
inline bool is_norm(const Node& node) { return is(node, "", "SimplifiedLayerNormalization"); }
inline bool is_residual_norm(const Node& node) {
  return is(node, kMicrosoft, "SkipSimplifiedLayerNormalization");
}

}  // namespace flownpu::npu
