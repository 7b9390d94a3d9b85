// SPDX-License-Identifier: Apache-2.0
// FlowKVAttention on the CPU (Gemma3 paper, section 3.2.2): one query, the KV cache streamed once.
// A long cache is cut into segments so that every thread reads a part of it; the segments' states
// (m, l, Y) are merged by eq. 9-11.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "ops/cpu/attention.h"

namespace flownpu::cpu {
namespace {

// Positions of a segment: 256 of head size 256 in bf16 are 256 KB of K and V, some 20 us of reading
// for a thread, so that handing it out (about 1 us) does not count.
constexpr std::int64_t kSegment = 256;

// The state of one segment: maximum and denominator [rows], numerator [rows][d].
struct SegmentState {
  float* maximum;
  float* denominator;
  float* numerator;
};

std::int64_t state_floats(std::int64_t rows, std::int64_t d) { return rows * (d + 2); }

SegmentState state_at(float* partial, std::int64_t index, std::int64_t rows, std::int64_t d) {
  float* state = partial + index * state_floats(rows, d);
  return {state, state + rows, state + 2 * rows};
}

std::int64_t segments(std::int64_t keys) {
  return std::max<std::int64_t>(1, (keys + kSegment - 1) / kSegment);
}

}  // namespace

std::int64_t FlowAttention::partial_floats(const AttentionCall& call) const {
  if (call.tokens != 1) return 0;
  // A window may begin inside a segment.
  return call.batch * attributes_.kv_heads * (segments(call.total) + 1) *
         state_floats(attributes_.heads_per_group(), attributes_.head_size);
}

void FlowAttention::attend_one_query(const AttentionCall& call, float* partial) const {
  const std::int64_t rows = attributes_.heads_per_group();
  const std::int64_t d = attributes_.head_size;
  const std::int64_t keys =
      attributes_.window > 0 ? std::min(attributes_.window, call.total) : call.total;
  const std::int64_t parts = segments(keys);
  const std::int64_t heads = call.batch * attributes_.kv_heads;
  context_.pool->run(heads * parts, [&](std::int64_t task) {
    const std::int64_t head = task / parts;
    const SegmentState state = state_at(partial, task, rows, d);
    const std::int64_t batch = head / attributes_.kv_heads;
    const AttentionRow row = row_of(call, batch);
    const std::int64_t end = row.past + row.tokens;
    const std::int64_t begin =
        attributes_.window > 0 ? std::max<std::int64_t>(0, end - attributes_.window) : 0;
    const std::int64_t from = begin + task % parts * kSegment;
    attend_segment(call, batch, head % attributes_.kv_heads, from, std::min(from + kSegment, end),
                   state.maximum, state.denominator, state.numerator);
  });

  auto* output = call.outputs[kOutput].as<float>();
  for (std::int64_t head = 0; head < heads; ++head) {
    for (std::int64_t r = 0; r < rows; ++r) {
      float maximum = -std::numeric_limits<float>::infinity();
      for (std::int64_t p = 0; p < parts; ++p) {
        maximum = std::max(maximum, state_at(partial, head * parts + p, rows, d).maximum[r]);
      }
      float* out = output + (head * rows + r) * d;
      std::fill_n(out, d, 0.0F);
      float denominator = 0;
      for (std::int64_t p = 0; p < parts; ++p) {
        const SegmentState state = state_at(partial, head * parts + p, rows, d);
        if (state.denominator[r] == 0) continue;
        const float correction = std::exp(state.maximum[r] - maximum);
        denominator += correction * state.denominator[r];
        for (std::int64_t i = 0; i < d; ++i) out[i] += correction * state.numerator[r * d + i];
      }
      const float inverse = denominator > 0 ? 1.0F / denominator : 0.0F;
      for (std::int64_t i = 0; i < d; ++i) out[i] *= inverse;
    }
  }
}

void FlowAttention::attend_segment(const AttentionCall& call, std::int64_t batch,
                                   std::int64_t group, std::int64_t begin, std::int64_t end,
                                   float* maximum, float* denominator, float* numerator) const {
  const std::int64_t rows = attributes_.heads_per_group();
  const std::int64_t d = attributes_.head_size;
  std::fill_n(maximum, rows, -std::numeric_limits<float>::infinity());
  std::fill_n(denominator, rows, 0.0F);
  std::fill_n(numerator, rows * d, 0.0F);

  alignas(64) float scores[kAttentionRows * kAttentionChunk];
  std::int32_t first_key[kAttentionRows] = {};
  std::int32_t last_key[kAttentionRows];
  const float* bias[kAttentionRows];
  const KeyValueRows cache = cache_rows(call, batch, group);
  const std::int64_t row_bytes = d * static_cast<std::int64_t>(size_of(call.cache_type));
  const bool biased = call.inputs.size() > kAttentionBias && call.inputs[kAttentionBias].present();
  for (std::int64_t start = begin; start < end; start += kAttentionChunk) {
    AttentionChunk chunk;
    chunk.keys = std::min(kAttentionChunk, end - start);
    std::fill_n(last_key, rows, static_cast<std::int32_t>(chunk.keys));
    for (std::int64_t r = 0; biased && r < rows; ++r) {
      bias[r] = attention_bias_row(call, batch, group * rows + r, 0) + start;
    }
    chunk.query = call.query + (batch * attributes_.kv_heads + group) * rows * d;
    chunk.rows = rows;
    chunk.head_size = d;
    chunk.key = cache.key + (start - cache.base) * row_bytes;
    chunk.value = cache.value + (start - cache.base) * row_bytes;
    chunk.cache_type = call.cache_type;
    chunk.first_key = first_key;
    chunk.last_key = last_key;
    chunk.bias = biased ? bias : nullptr;
    chunk.softcap = attributes_.softcap;
    chunk.maximum = maximum;
    chunk.denominator = denominator;
    chunk.numerator = numerator;
    chunk.scratch = scores;
    context_.kernels.attend(chunk);
  }
}

}  // namespace flownpu::cpu
