// SPDX-License-Identifier: Apache-2.0
// FlowQKVAttention on the CPU (Gemma3 paper, section 3.1.3): each task takes a tile of queries of
// one KV head and sweeps the KV chunks that the tile may see; causal, sliding window (SWA) and
// non-causal (NCA) differ in the sweep only.
#include <algorithm>
#include <cstring>
#include <limits>

#include "ops/cpu/attention.h"

namespace flownpu::cpu {
namespace {

// As many query rows (queries x heads of a group) as a chunk takes.
std::int64_t queries_each(const AttentionAttributes& attributes) {
  return std::max<std::int64_t>(1, kAttentionRows / attributes.heads_per_group());
}

struct Tile {
  alignas(64) float numerator[kAttentionRows * kMaxHeadSize];
  alignas(64) float scores[kAttentionRows * kAttentionChunk];
  float maximum[kAttentionRows];
  float denominator[kAttentionRows];
  // The range of positions that a row sees.
  std::int64_t first[kAttentionRows];
  std::int64_t last[kAttentionRows];
};

}  // namespace

void FlowAttention::attend_queries(const AttentionCall& call) const {
  const std::int64_t each = queries_each(attributes_);
  const std::int64_t tiles = (call.tokens + each - 1) / each;
  const std::int64_t heads = call.batch * attributes_.kv_heads;
  context_.pool->run(heads * tiles, [&](std::int64_t task) {
    // The last tiles first: under a causal mask they see the most keys.
    const std::int64_t first_token = (tiles - 1 - task / heads) * each;
    const std::int64_t batch = task % heads / attributes_.kv_heads;
    attend_tile(call, batch, task % attributes_.kv_heads, first_token,
                std::min(each, call.tokens - first_token));
  });
}

void FlowAttention::attend_tile(const AttentionCall& call, std::int64_t batch, std::int64_t group,
                                std::int64_t first_token, std::int64_t tokens) const {
  const std::int64_t d = attributes_.head_size;
  const std::int64_t per_group = attributes_.heads_per_group();
  const std::int64_t rows = tokens * per_group;
  const AttentionRow row = row_of(call, batch);
  const std::int64_t total = row.past + row.tokens;
  Tile tile;
  std::int64_t begin = total;
  std::int64_t end = 0;
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t token = first_token + r / per_group;
    const std::int64_t position = row.past + token;
    // A query that is padding on the right sees nothing.
    tile.last[r] = token >= row.tokens ? 0 : attributes_.causal ? position + 1 : total;
    tile.first[r] =
        attributes_.window > 0 ? std::max<std::int64_t>(0, position + 1 - attributes_.window) : 0;
    begin = std::min(begin, tile.first[r]);
    end = std::max(end, tile.last[r]);
    tile.maximum[r] = -std::numeric_limits<float>::infinity();
    tile.denominator[r] = 0;
  }
  std::memset(tile.numerator, 0, static_cast<std::size_t>(rows * d) * sizeof(float));

  const KeyValueRows cache = cache_rows(call, batch, group);
  const std::int64_t row_bytes = d * static_cast<std::int64_t>(size_of(call.cache_type));
  const bool biased = call.inputs.size() > kAttentionBias && call.inputs[kAttentionBias].present();
  for (std::int64_t start = begin; start < end; start += kAttentionChunk) {
    AttentionChunk chunk;
    std::int32_t first_key[kAttentionRows];
    std::int32_t last_key[kAttentionRows];
    const float* bias[kAttentionRows];
    chunk.keys = std::min(kAttentionChunk, end - start);
    for (std::int64_t r = 0; r < rows; ++r) {
      first_key[r] =
          static_cast<std::int32_t>(std::clamp<std::int64_t>(tile.first[r] - start, 0, chunk.keys));
      last_key[r] =
          static_cast<std::int32_t>(std::clamp<std::int64_t>(tile.last[r] - start, 0, chunk.keys));
      if (biased) {
        bias[r] = attention_bias_row(call, batch, group * per_group + r % per_group,
                                     first_token + r / per_group) +
                  start;
      }
    }
    chunk.query =
        call.query +
        ((batch * attributes_.kv_heads + group) * call.tokens + first_token) * per_group * d;
    chunk.rows = rows;
    chunk.head_size = d;
    chunk.key = cache.key + (start - cache.base) * row_bytes;
    chunk.value = cache.value + (start - cache.base) * row_bytes;
    chunk.cache_type = call.cache_type;
    chunk.first_key = first_key;
    chunk.last_key = last_key;
    chunk.bias = biased ? bias : nullptr;
    chunk.softcap = attributes_.softcap;
    chunk.maximum = tile.maximum;
    chunk.denominator = tile.denominator;
    chunk.numerator = tile.numerator;
    chunk.scratch = tile.scores;
    context_.kernels.attend(chunk);
  }

  // O = Y / l (eq. 12); a row that saw nothing is zero.
  auto* output = call.outputs[kOutput].as<float>();
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t token = first_token + r / per_group;
    const std::int64_t head = group * per_group + r % per_group;
    float* out = output + ((batch * call.tokens + token) * attributes_.heads + head) * d;
    const float inverse = tile.denominator[r] > 0 ? 1.0F / tile.denominator[r] : 0.0F;
    for (std::int64_t i = 0; i < d; ++i) out[i] = tile.numerator[r * d + i] * inverse;
  }
}

}  // namespace flownpu::cpu
