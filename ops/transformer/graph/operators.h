// SPDX-License-Identifier: Apache-2.0
// Recognises the operators that the layers of decoders and encoders consist of.
#pragma once

#include <cstdint>
#include <string_view>

#include "ops/nodes/flow_qkv_attention.h"
#include "ops/nodes/node.h"
#include "ops/nodes/q4nx_matmul.h"

namespace flownpu::transformer {

// Positions of DenseMatMul's inputs after X and W (ops/definitions/dense_matmul.py).
enum DenseInput : std::uint8_t { kDenseScale = 2, kDenseBias = 3, kDenseResidual = 4 };

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
inline bool is_paged_attention(const Node& node) { return is(node, kDomain, "PagedAttention"); }
inline bool is_convolution(const Node& node) { return is(node, kMicrosoft, "CausalConvWithState"); }
inline bool is_norm(const Node& node) { return is(node, "", "SimplifiedLayerNormalization"); }
inline bool is_residual_norm(const Node& node) {
  return is(node, kMicrosoft, "SkipSimplifiedLayerNormalization");
}

}  // namespace flownpu::transformer
