// SPDX-License-Identifier: Apache-2.0
// FlowQKVAttention and FlowKVAttention on the CPU (Gemma3 paper, sections 3.1.3 and 3.2.2): each
// task sweeps the keys that a tile of queries of one KV head sees, or a part of them; causal,
// sliding window (SWA) and non-causal (NCA) differ in the sweep only. Parts are merged by eq. 9-12.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "ops/cpu/attention.h"

namespace flownpu::cpu {
namespace {

// What a task works with.
struct TileMemory {
  TileMemory(Scratch& scratch, const AttentionCall& call, std::int64_t rows, std::int64_t d,
             std::int64_t kernel_bytes)
      : query(scratch.take<float>(rows * d)),
        maximum(scratch.take<float>(rows)),
        denominator(scratch.take<float>(rows)),
        numerator(scratch.take<float*>(rows)),
        bias(scratch.take<const float*>(rows)),
        first_key(scratch.take<std::int32_t>(rows)),
        last_key(scratch.take<std::int32_t>(rows)),
        kernel(call.plan.few ? nullptr : scratch.take<std::byte>(kernel_bytes)) {}

  float* query;
  float* maximum;
  float* denominator;
  float** numerator;
  const float** bias;
  std::int32_t* first_key;
  std::int32_t* last_key;
  std::byte* kernel;
};

TileMemory tile_memory(Scratch& scratch, const AttentionCall& call, const Kernels& kernels,
                       const AttentionAttributes& a) {
  const std::int64_t rows = call.plan.tile_tokens * a.heads_per_group();
  return {scratch, call, rows, a.head_size,
          kernels.attention_scratch(rows, a.head_size, call.cache_type, call.plan.chunk_keys)};
}

// States of parts: for each row of queries [B][S][H] and each part maximum, denominator, numerator
// [d].
float* part_state(const AttentionCall& call, const AttentionAttributes& a, std::int64_t batch,
                  std::int64_t token, std::int64_t head, std::int64_t part) {
  const std::int64_t row = (batch * call.tokens + token) * a.heads + head;
  return call.states + (row * call.plan.parts + part) * (a.head_size + 2);
}

float* output_row(const AttentionCall& call, const AttentionAttributes& a, std::int64_t batch,
                  std::int64_t token, std::int64_t head) {
  return call.outputs[kOutput].as<float>() +
         ((batch * call.tokens + token) * a.heads + head) * a.head_size;
}

struct Range {
  std::int64_t begin;
  std::int64_t end;
};

// Part `part` of `parts`, cut where chunks are.
Range part_of(Range keys, std::int64_t part, std::int64_t parts) {
  const auto cut = [&](std::int64_t index) {
    if (index == parts) return keys.end;
    const std::int64_t at = (keys.end - keys.begin) * index / parts;
    return keys.begin + at / kAttentionKeyStep * kAttentionKeyStep;
  };
  return {cut(part), cut(part + 1)};
}

}  // namespace

void FlowAttention::take_tiles(Scratch& scratch, AttentionCall& call) const {
  Scratch one;
  tile_memory(one, call, context_.kernels, attributes_);
  call.tile_bytes = static_cast<std::int64_t>(one.bytes());
  call.tiles = scratch.take<std::byte>(call.most_slots * call.tile_bytes);
  if (call.most_parts > 1) {
    call.states = scratch.take<float>(call.batch * call.tokens * attributes_.heads *
                                      call.most_parts * (attributes_.head_size + 2));
  }
}

void FlowAttention::attend(const AttentionCall& call) const {
  std::atomic<std::int64_t> next{0};
  context_.pool->run(call.plan.slots, [&](std::int64_t slot) {
    for (std::int64_t task = next++; task < call.plan.tasks; task = next++)
      attend_tile(call, slot, task);
  });
  if (call.plan.parts == 1) return;
  context_.pool->run(call.batch * call.tokens, [&](std::int64_t index) {
    merge_token(call, index / call.tokens, index % call.tokens);
  });
}

void FlowAttention::attend_tile(const AttentionCall& call, std::int64_t slot,
                                std::int64_t task) const {
  const std::int64_t d = attributes_.head_size;
  const std::int64_t per_group = attributes_.heads_per_group();
  const std::int64_t part = task % call.plan.parts;
  const std::int64_t head = task / call.plan.parts % (call.batch * attributes_.kv_heads);
  const std::int64_t batch = head / attributes_.kv_heads;
  const std::int64_t group = head % attributes_.kv_heads;
  // The last tiles first: under a causal mask they see the most keys.
  const std::int64_t tile =
      call.plan.tiles - 1 - task / call.plan.parts / (call.batch * attributes_.kv_heads);
  const std::int64_t first_token = tile * call.plan.tile_tokens;
  const std::int64_t tokens = std::min(call.plan.tile_tokens, call.tokens - first_token);
  const AttentionRow row = row_of(call, batch);
  const std::int64_t total = row.past + row.tokens;

  // A query that is padding on the right sees nothing.
  const auto sees = [&](std::int64_t token) -> Range {
    if (token >= row.tokens) return {0, 0};
    const std::int64_t position = row.past + token;
    return {
        attributes_.window > 0 ? std::max<std::int64_t>(0, position + 1 - attributes_.window) : 0,
        attributes_.causal ? position + 1 : total};
  };
  const std::int64_t valid = std::clamp<std::int64_t>(row.tokens - first_token, 0, tokens);
  const KeyValueRows cache = cache_rows(call, batch, group);
  const Range seen = valid == 0 ? Range{cache.base, cache.base}
                                : Range{sees(first_token).begin, sees(first_token + valid - 1).end};
  const Range keys = part_of(seen, part, call.plan.parts);

  Scratch scratch(call.tiles + slot * call.tile_bytes);
  const TileMemory memory = tile_memory(scratch, call, context_.kernels, attributes_);
  const bool biased = call.inputs.size() > kAttentionBias && call.inputs[kAttentionBias].present();
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::int64_t token = first_token + t;
    const Range range = sees(token);
    if (t < valid) prepare_queries(call, batch, group, token, memory.query + t * per_group * d);
    for (std::int64_t h = 0; h < per_group; ++h) {
      const std::int64_t r = t * per_group + h;
      const std::int64_t query_head = group * per_group + h;
      const auto within = [&](std::int64_t position) {
        return static_cast<std::int32_t>(std::clamp(position, keys.begin, keys.end) - keys.begin);
      };
      memory.first_key[r] = within(range.begin);
      memory.last_key[r] = within(range.end);
      if (biased) memory.bias[r] = attention_bias_row(call, batch, query_head, token) + keys.begin;
      memory.numerator[r] = call.plan.parts > 1
                                ? part_state(call, attributes_, batch, token, query_head, part) + 2
                                : output_row(call, attributes_, batch, token, query_head);
    }
  }

  const std::int64_t row_bytes = d * static_cast<std::int64_t>(size_of(call.cache_type));
  const std::int64_t offset = (keys.begin - cache.base) * row_bytes;
  AttentionSweep sweep;
  sweep.query = memory.query;
  sweep.rows = tokens * per_group;
  sweep.head_size = d;
  sweep.key = cache.key + offset;
  sweep.value = cache.value + offset;
  sweep.cache_type = call.cache_type;
  sweep.keys = keys.end - keys.begin;
  sweep.first_key = memory.first_key;
  sweep.last_key = memory.last_key;
  sweep.bias = biased ? memory.bias : nullptr;
  sweep.softcap = attributes_.softcap;
  sweep.chunk_keys = call.plan.chunk_keys;
  sweep.maximum = memory.maximum;
  sweep.denominator = memory.denominator;
  sweep.numerator = memory.numerator;
  sweep.scratch = memory.kernel;
  if (call.plan.few) {
    context_.kernels.attend_few(sweep);
  } else {
    context_.kernels.attend_many(sweep);
  }

  for (std::int64_t r = 0; r < sweep.rows; ++r) {
    if (call.plan.parts > 1) {
      memory.numerator[r][-2] = memory.maximum[r];
      memory.numerator[r][-1] = memory.denominator[r];
      continue;
    }
    // O = Y / l (eq. 12); a row that saw nothing is zero.
    const float inverse = memory.denominator[r] > 0 ? 1.0F / memory.denominator[r] : 0.0F;
    for (std::int64_t i = 0; i < d; ++i) memory.numerator[r][i] *= inverse;
  }
}

void FlowAttention::merge_token(const AttentionCall& call, std::int64_t batch,
                                std::int64_t token) const {
  const std::int64_t d = attributes_.head_size;
  for (std::int64_t head = 0; head < attributes_.heads; ++head) {
    const float* states = part_state(call, attributes_, batch, token, head, 0);
    float maximum = -std::numeric_limits<float>::infinity();
    for (std::int64_t p = 0; p < call.plan.parts; ++p)
      maximum = std::max(maximum, states[p * (d + 2)]);
    float* out = output_row(call, attributes_, batch, token, head);
    std::fill_n(out, d, 0.0F);
    float denominator = 0;
    for (std::int64_t p = 0; p < call.plan.parts; ++p) {
      const float* state = states + p * (d + 2);
      if (state[1] == 0) continue;
      const float correction = std::exp(state[0] - maximum);
      denominator += correction * state[1];
      for (std::int64_t i = 0; i < d; ++i) out[i] += correction * state[2 + i];
    }
    const float inverse = denominator > 0 ? 1.0F / denominator : 0.0F;
    for (std::int64_t i = 0; i < d; ++i) out[i] *= inverse;
  }
}

}  // namespace flownpu::cpu
