// SPDX-License-Identifier: Apache-2.0
// Attention over keys and values that are all there: without a cache, with any number of keys, by
// the kernels of FlowQKVAttention. No scores are stored but those of a chunk of keys.
#pragma once

#include <cstdint>

#include "ops/cpu/attention/plan.h"
#include "ops/cpu/attention/tiles.h"
#include "ops/cpu/step.h"

namespace flownpu::cpu {

// Heads of d elements in f32: where that of a token begins. A stride is in elements.
template <typename T>
struct HeadRows {
  T* data = nullptr;
  std::int64_t batch_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t token_stride = 0;

  T* at(std::int64_t batch, std::int64_t head, std::int64_t token) const {
    return data + batch * batch_stride + head * head_stride + token * token_stride;
  }
};

// H query heads share G KV heads of size d.
struct WholeAttentionSizes {
  std::int64_t batch = 0;
  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t head_size = 0;
  std::int64_t queries = 0;
  std::int64_t keys = 0;
};

struct WholeAttentionCall {
  HeadRows<const float> query;
  HeadRows<const float> key;
  HeadRows<const float> value;
  // Added to the scores, a row of keys for each query; null: none.
  HeadRows<const float> bias;
  HeadRows<float> output;
};

class WholeAttention {
 public:
  // `causal`: query i sees keys 0 .. i. `softcap`: 0, none. `rounds`: whether queries, keys, values
  // and probabilities may be rounded to bf16, in which some kernels multiply faster.
  WholeAttention(const Context& context, float scale, float softcap, bool causal, bool rounds);

  std::size_t scratch_bytes(const WholeAttentionSizes& sizes) const;
  void run(const WholeAttentionSizes& sizes, const WholeAttentionCall& call,
           std::byte* memory) const;

 private:
  struct Work;

  Work take(Scratch& scratch, const WholeAttentionSizes& sizes) const;
  TileMemory tile_memory(Scratch& scratch, const WholeAttentionSizes& sizes,
                         const Work& work) const;
  void store(const WholeAttentionSizes& sizes, const WholeAttentionCall& call,
             const Work& work) const;
  void attend(const WholeAttentionSizes& sizes, const WholeAttentionCall& call, const Work& work,
              std::int64_t task, const TileMemory& memory) const;

  Context context_;
  float scale_;
  float softcap_;
  bool causal_;
  bool rounds_;
  std::int64_t cache_bytes_;
};

}  // namespace flownpu::cpu
