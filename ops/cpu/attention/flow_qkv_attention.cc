// SPDX-License-Identifier: Apache-2.0
// FlowQKVAttention on the CPU (Gemma3 paper, section 3.1.3): a task sweeps all or some of the keys
// that a tile of queries of one KV head sees. Causal, sliding-window (SWA) and non-causal (NCA)
// attention differ only in the keys that a query sees.
#include <algorithm>
#include <cmath>

#include "ops/cpu/attention/step.h"

namespace flownpu::cpu {
namespace {

// attention_bias of one query, from position 0 on.
const float* bias_row(const AttentionCall& call, std::int64_t batch, std::int64_t head,
                      std::int64_t token) {
  const Tensor& bias = call.input(kAttentionBias);
  const Shape& shape = bias.shape;
  const std::int64_t b = shape[0] == 1 ? 0 : batch;
  const std::int64_t h = shape[1] == 1 ? 0 : head;
  return bias.as<const float>() +
         ((b * shape[1] + h) * shape[2] + call.first_token + token) * shape[3];
}

}  // namespace

// A task: tokens [first_token, first_token + tokens) of the call, of which the first `valid` are
// not padding, for the heads of one group, over a part of the keys.
struct FlowQKVAttention::Tile {
  std::int64_t batch;
  std::int64_t group;
  std::int64_t first_token;
  std::int64_t tokens;
  std::int64_t valid;
  std::int64_t part;
  AttentionRow row;
  KeyRange keys;
};

// Rows are [tokens][H / G].
TileMemory FlowQKVAttention::tile_memory(Scratch& scratch, const AttentionCall& call) const {
  const std::int64_t rows = call.plan.tile_tokens * attributes_.heads_per_group();
  const std::int64_t d = attributes_.head_size;
  const auto kernel_bytes = call.plan.few ? 0
                                          : context_.kernels.attention_scratch(
                                                rows, d, call.cache_type, call.plan.chunk_keys);
  return {scratch, rows, d, kernel_bytes};
}

void FlowQKVAttention::take_tiles(Scratch& scratch, AttentionCall& call) const {
  Scratch one;
  tile_memory(one, call);
  call.tile_bytes = static_cast<std::int64_t>(one.bytes());
  call.tiles = scratch.take<std::byte>(context_.pool->threads() * call.tile_bytes);
}

void FlowQKVAttention::attend(const AttentionCall& call) const {
  const AttentionPlan& plan = call.plan;
  if (plan.parts > 1) std::fill_n(call.parts_left, plan.tasks / plan.parts, plan.parts);
  const auto compute = [&](std::int64_t task, std::size_t thread) {
    Scratch scratch(call.tiles + static_cast<std::int64_t>(thread) * call.tile_bytes);
    const TileMemory memory = tile_memory(scratch, call);
    const Tile tile = tile_of(call, task);
    fill(call, tile, memory);
    sweep(call, tile, memory);
    if (plan.parts > 1 && was_last_part(call, task / plan.parts)) merge_parts(call, tile);
  };
  // Tasks of few rows take equally long; in this order each thread reads one range of the cache.
  if (plan.few) return context_.pool->run(plan.tasks, compute);
  // Tasks of more rows take unequally long: a free thread takes the longest that is left.
  run_in_order(*context_.pool, plan.tasks, compute);
}

void FlowQKVAttention::merge_parts(const AttentionCall& call, const Tile& tile) const {
  const std::int64_t per_group = attributes_.heads_per_group();
  for (std::int64_t t = 0; t < tile.tokens; ++t) {
    for (std::int64_t h = 0; h < per_group; ++h)
      merge_head(call, tile.batch, tile.first_token + t, tile.group * per_group + h);
  }
}

FlowQKVAttention::Tile FlowQKVAttention::tile_of(const AttentionCall& call,
                                                 std::int64_t task) const {
  const std::int64_t heads = call.batch * attributes_.kv_heads;
  const std::int64_t head = task / call.plan.parts % heads;
  // The last tiles first: under a causal mask they see the most keys.
  const std::int64_t index = call.plan.tiles - 1 - task / call.plan.parts / heads;
  Tile tile{};
  tile.batch = head / attributes_.kv_heads;
  tile.group = head % attributes_.kv_heads;
  tile.first_token = index * call.plan.tile_tokens;
  tile.tokens = std::min(call.plan.tile_tokens, call.tokens - tile.first_token);
  tile.part = task % call.plan.parts;
  tile.row = row_of(call, tile.batch);
  tile.valid = std::clamp<std::int64_t>(tile.row.tokens - tile.first_token, 0, tile.tokens);
  const std::int64_t base = cache_rows(call, tile.batch, tile.group).base;
  KeyRange seen{base, base};
  if (tile.valid > 0) {
    seen = {seen_by(tile.row, tile.first_token).begin,
            seen_by(tile.row, tile.first_token + tile.valid - 1).end};
  }
  tile.keys = part_of(seen, tile.part, call.plan.parts);
  return tile;
}

// A query that is padding on the right sees nothing.
KeyRange FlowQKVAttention::seen_by(const AttentionRow& row, std::int64_t token) const {
  if (token >= row.tokens) return {0, 0};
  const std::int64_t position = row.past + token;
  std::int64_t seen_tokens = attributes_.causal ? token + 1 : row.tokens;
  if (row.seen_tokens != nullptr) seen_tokens = row.seen_tokens[token];
  return {attributes_.window > 0 ? std::max<std::int64_t>(0, position + 1 - attributes_.window) : 0,
          row.past + seen_tokens};
}

float* FlowQKVAttention::output_row(const AttentionCall& call, std::int64_t batch,
                                    std::int64_t token, std::int64_t head) const {
  return call.outputs[kAttended].as<float>() +
         ((batch * call.tokens + token) * attributes_.heads + head) * attributes_.head_size;
}

// Fills the tile's memory: queries, the keys that each sees, and where its numerator goes.
void FlowQKVAttention::fill(const AttentionCall& call, const Tile& tile,
                            const TileMemory& memory) const {
  const std::int64_t per_group = attributes_.heads_per_group();
  const KeyRange& keys = tile.keys;
  const bool biased = call.input(kAttentionBias).present();
  const auto within = [&](std::int64_t position) {
    return static_cast<std::int32_t>(std::clamp(position, keys.begin, keys.end) - keys.begin);
  };
  for (std::int64_t t = 0; t < tile.tokens; ++t) {
    const std::int64_t token = tile.first_token + t;
    const KeyRange seen = seen_by(tile.row, token);
    if (t < tile.valid) {
      prepare_queries(call, tile.batch, tile.group, token,
                      memory.query + t * per_group * attributes_.head_size);
    }
    for (std::int64_t h = 0; h < per_group; ++h) {
      const std::int64_t r = t * per_group + h;
      const std::int64_t head = tile.group * per_group + h;
      memory.first_key[r] = within(seen.begin);
      memory.last_key[r] = within(seen.end);
      if (biased) memory.bias[r] = bias_row(call, tile.batch, head, token) + keys.begin;
      memory.numerator[r] = call.plan.parts > 1
                                ? part_state(call, tile.batch, token, head, tile.part).numerator
                                : output_row(call, tile.batch, token, head);
    }
  }
}

// Eq. 6-11 over the keys of the tile; with one part eq. 12, the division, as well.
void FlowQKVAttention::sweep(const AttentionCall& call, const Tile& tile,
                             const TileMemory& memory) const {
  const std::int64_t per_group = attributes_.heads_per_group();
  const KeyValueRows cache = cache_rows(call, tile.batch, tile.group);
  const std::int64_t offset = (tile.keys.begin - cache.base) * call.row_bytes;
  AttentionSweep sweep;
  sweep.query = memory.query;
  sweep.rows = tile.tokens * per_group;
  sweep.head_size = attributes_.head_size;
  sweep.key = cache.key + offset;
  sweep.value = cache.value + offset;
  sweep.row_bytes = call.row_bytes;
  sweep.cache_type = call.cache_type;
  sweep.keys = tile.keys.end - tile.keys.begin;
  sweep.position = tile.keys.begin;
  sweep.first_key = memory.first_key;
  sweep.last_key = memory.last_key;
  sweep.bias = call.input(kAttentionBias).present() ? memory.bias : nullptr;
  sweep.softcap = attributes_.softcap;
  sweep.chunk_keys = call.plan.chunk_keys;
  sweep.maximum = memory.maximum;
  sweep.denominator = memory.denominator;
  sweep.numerator = memory.numerator;
  sweep.scratch = memory.kernel;
  if (call.plan.few) {
    context_.kernels.attend_few_rows(sweep);
  } else {
    context_.kernels.attend_many(sweep);
  }
  for (std::int64_t r = 0; r < sweep.rows; ++r) {
    const std::int64_t head = tile.group * per_group + r % per_group;
    if (call.plan.parts == 1) {
      divide(memory.numerator[r],
             denominator_of(call, head, memory.maximum[r], memory.denominator[r]),
             attributes_.head_size);
      continue;
    }
    const PartState state =
        part_state(call, tile.batch, tile.first_token + r / per_group, head, tile.part);
    *state.maximum = memory.maximum[r];
    *state.denominator = memory.denominator[r];
  }
}

// Adds the head's sink, a key whose value is 0, to the denominator. A query that saw nothing stays
// zero. Where the sink is far above all scores, e^(sink - m) is infinite, and the output is 0.
float FlowQKVAttention::denominator_of(const AttentionCall& call, std::int64_t head, float maximum,
                                       float denominator) const {
  const Tensor& sink = call.input(kHeadSink);
  if (!sink.present() || denominator == 0) return denominator;
  return denominator + std::exp(sink.as<const float>()[head] - maximum);
}

std::span<const Operator> flow_qkv_attention_operators() {
  static const Operator kOperators[] = {
      {kFlowQKVAttention,
       [](const Node& node, const Context& context) -> std::unique_ptr<Step> {
         return std::make_unique<FlowQKVAttention>(node, context);
       }},
  };
  return kOperators;
}

}  // namespace flownpu::cpu
