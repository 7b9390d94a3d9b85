// SPDX-License-Identifier: Apache-2.0
// Heads of attention: the attributes with their number and with the keys that they see, and the
// preparation of a head before its product (QK-norm, RoPE, scale).
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "ops/cpu/kernels.h"
#include "ops/nodes/node.h"
#include "ops/nodes/tensor.h"

namespace flownpu::cpu {

// Positions are counted in 32 bits by the kernels.
inline constexpr std::int64_t kMostPositions = std::numeric_limits<std::int32_t>::max();

// H query heads share G KV heads of size d. Attributes that an operator does not have are at their
// defaults.
struct AttentionAttributes {
  explicit AttentionAttributes(const Node& node);

  std::string name;
  std::int64_t heads;
  std::int64_t kv_heads;
  std::int64_t head_size;
  float scale;
  float softcap;
  // W, or 0 for none.
  std::int64_t window;
  bool causal;
  bool rotary;
  bool rotary_interleaved;
  // Whether the tokens of a first prompt count on from position_ids[0, 0], in every row.
  bool counted_prompt;
  float norm_epsilon;
  bool window_sized_cache;

  std::int64_t heads_per_group() const { return heads / kv_heads; }
};

// The parameters of all heads of queries, or of keys, in one call.
struct HeadPreparation {
  std::int64_t head_size;
  // QK-norm's weight, f32 [head_size]; null: none.
  const float* norm;
  float norm_epsilon;
  // RoPE's tables, f32 [positions][half]; null: none. With half < head_size / 2 only the first 2
  // half elements of a head are rotated.
  const float* cos;
  const float* sin;
  std::int64_t half;
  bool interleaved;

  // Norms and rotates one head, f32 [head_size], in place.
  void prepare(const Kernels& kernels, float* head, std::int64_t position) const;
  // Prepares `heads` heads of one token's query and multiplies them by `scale`:
  // out[heads][head_size].
  void prepare_queries(const Kernels& kernels, const float* query, std::int64_t heads,
                       std::int64_t position, float scale, float* out) const;
};

// An absent tensor means no norm, or no RoPE.
HeadPreparation head_preparation(const AttentionAttributes& attributes, const Tensor& norm,
                                 const Tensor& cos, const Tensor& sin);

// Multiply-adds of a token, for the placement report. The number of keys is the window's or,
// without a window, a nominal number, because the context is not known.
std::int64_t attention_multiply_adds(const AttentionAttributes& attributes);

}  // namespace flownpu::cpu
