// SPDX-License-Identifier: Apache-2.0
// Heads of attention: the attributes that say how many there are and what they see, and what a head
// of a query or a key goes through before the two meet: QK-norm, RoPE and the scale.
#pragma once

#include <cstdint>
#include <string>

#include "ops/cpu/kernels.h"
#include "ops/nodes/node.h"
#include "ops/nodes/tensor.h"

namespace flownpu::cpu {

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

// What all heads of queries, or of keys, have in common in one call.
struct HeadPreparation {
  std::int64_t head_size;
  // QK-norm's weight, f32 [head_size]; null: none.
  const float* norm;
  float norm_epsilon;
  // RoPE's tables, f32 [positions][half]; null: none. Of fewer than head_size / 2 angles they
  // rotate the front of the head only.
  const float* cos;
  const float* sin;
  std::int64_t half;
  bool interleaved;

  // In place, of a head at a position.
  void prepare(const Kernels& kernels, float* head, std::int64_t position) const;
  // `heads` heads of a query's token, scaled: out[heads][head_size].
  void prepare_queries(const Kernels& kernels, const float* query, std::int64_t heads,
                       std::int64_t position, float scale, float* out) const;
};

// Tensors that are absent: no norm, no RoPE.
HeadPreparation head_preparation(const AttentionAttributes& attributes, const Tensor& norm,
                                 const Tensor& cos, const Tensor& sin);

// What a layer without a window is taken to see, where the context is not known, and one with a
// window sees at most: multiply-adds of a token.
std::int64_t attention_multiply_adds(const AttentionAttributes& attributes);

}  // namespace flownpu::cpu
