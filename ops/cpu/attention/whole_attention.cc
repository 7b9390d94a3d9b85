// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/attention/whole_attention.h"

#include <algorithm>

#include "ops/nodes/kv_cache.h"
#include "ops/system/processors.h"

namespace flownpu::cpu {

// Keys and values as the kernels multiply them, [batch][G][keys] rows each.
struct WholeAttention::Work {
  DataType type = DataType::kFloat32;
  std::int64_t row_bytes = 0;
  AttentionPlan plan{};
  std::byte* key = nullptr;
  std::byte* value = nullptr;
  // Memory of each thread.
  std::byte* tiles = nullptr;
  std::int64_t tile_bytes = 0;
};

WholeAttention::WholeAttention(const Context& context, float scale, float softcap, bool causal,
                               bool rounds)
    : context_(context),
      scale_(scale),
      softcap_(softcap),
      causal_(causal),
      rounds_(rounds),
      cache_bytes_(second_level_cache_bytes()) {}

TileMemory WholeAttention::tile_memory(Scratch& scratch, const WholeAttentionSizes& sizes,
                                       const Work& work) const {
  const std::int64_t rows = work.plan.tile_tokens * (sizes.heads / sizes.kv_heads);
  const std::int64_t kernel_bytes =
      work.plan.few ? 0
                    : context_.kernels.attention_scratch(rows, sizes.head_size, work.type,
                                                         work.plan.chunk_keys);
  return {scratch, rows, sizes.head_size, kernel_bytes};
}

WholeAttention::Work WholeAttention::take(Scratch& scratch,
                                          const WholeAttentionSizes& sizes) const {
  const Kernels& kernels = context_.kernels;
  Work work;
  if (rounds_ && kernels.attention_element(sizes.head_size, DataType::kBFloat16) == 2)
    work.type = DataType::kBFloat16;
  work.row_bytes = cache_row_bytes(work.type, sizes.head_size);
  // All keys of a tile are one part.
  work.plan =
      plan_attention({sizes.batch, sizes.kv_heads, sizes.heads / sizes.kv_heads, sizes.head_size,
                      sizes.queries, sizes.keys, 0, work.row_bytes},
                     {context_.pool->threads(), cache_bytes_, kernels.few_rows, kernels.block_rows,
                      kernels.attention_element(sizes.head_size, work.type)});
  const std::int64_t bytes = sizes.batch * sizes.kv_heads * sizes.keys * work.row_bytes;
  work.key = scratch.take<std::byte>(bytes);
  work.value = scratch.take<std::byte>(bytes);
  Scratch one;
  tile_memory(one, sizes, work);
  work.tile_bytes = static_cast<std::int64_t>(one.bytes());
  work.tiles = scratch.take<std::byte>(context_.pool->threads() * work.tile_bytes);
  return work;
}

std::size_t WholeAttention::scratch_bytes(const WholeAttentionSizes& sizes) const {
  Scratch scratch;
  take(scratch, sizes);
  return scratch.bytes();
}

void WholeAttention::run(const WholeAttentionSizes& sizes, const WholeAttentionCall& call,
                         std::byte* memory) const {
  Scratch scratch(memory);
  const Work work = take(scratch, sizes);
  store(sizes, call, work);
  const std::int64_t tasks = sizes.batch * sizes.kv_heads * work.plan.tiles;
  run_in_order(*context_.pool, tasks, [&](std::int64_t task, std::size_t thread) {
    Scratch own(work.tiles + static_cast<std::int64_t>(thread) * work.tile_bytes);
    attend(sizes, call, work, task, tile_memory(own, sizes, work));
  });
}

void WholeAttention::store(const WholeAttentionSizes& sizes, const WholeAttentionCall& call,
                           const Work& work) const {
  const std::int64_t rows = sizes.batch * sizes.kv_heads * sizes.keys;
  context_.pool->run_rows(rows, [&](std::int64_t row) {
    const std::int64_t key = row % sizes.keys;
    const std::int64_t head = row / sizes.keys % sizes.kv_heads;
    const std::int64_t batch = row / sizes.keys / sizes.kv_heads;
    const auto put = [&](const HeadRows<const float>& from, std::byte* to) {
      context_.kernels.store_cache(from.at(batch, head, key), to + row * work.row_bytes, work.type,
                                   sizes.head_size);
    };
    put(call.key, work.key);
    put(call.value, work.value);
  });
}

// Task t is a tile of queries of one KV head, the last tiles first: under a causal mask they see
// the most keys.
void WholeAttention::attend(const WholeAttentionSizes& sizes, const WholeAttentionCall& call,
                            const Work& work, std::int64_t task, const TileMemory& memory) const {
  const std::int64_t d = sizes.head_size;
  const std::int64_t per_group = sizes.heads / sizes.kv_heads;
  const std::int64_t groups = sizes.batch * sizes.kv_heads;
  const std::int64_t group = task % groups;
  const std::int64_t batch = group / sizes.kv_heads;
  const std::int64_t first = (work.plan.tiles - 1 - task / groups) * work.plan.tile_tokens;
  const std::int64_t tokens = std::min(work.plan.tile_tokens, sizes.queries - first);
  const std::int64_t rows = tokens * per_group;
  const auto last_key = [&](std::int64_t token) {
    return causal_ ? std::min(token + 1, sizes.keys) : sizes.keys;
  };
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t token = first + r / per_group;
    const std::int64_t head = group % sizes.kv_heads * per_group + r % per_group;
    const float* query = call.query.at(batch, head, token);
    std::transform(query, query + d, memory.query + r * d, [this](float x) { return x * scale_; });
    memory.first_key[r] = 0;
    memory.last_key[r] = static_cast<std::int32_t>(last_key(token));
    memory.numerator[r] = call.output.at(batch, head, token);
    if (call.bias.data != nullptr) memory.bias[r] = call.bias.at(batch, head, token);
  }
  AttentionSweep sweep;
  sweep.query = memory.query;
  sweep.rows = rows;
  sweep.head_size = d;
  sweep.key = work.key + group * sizes.keys * work.row_bytes;
  sweep.value = work.value + group * sizes.keys * work.row_bytes;
  sweep.row_bytes = work.row_bytes;
  sweep.cache_type = work.type;
  sweep.keys = last_key(first + tokens - 1);
  sweep.first_key = memory.first_key;
  sweep.last_key = memory.last_key;
  sweep.bias = call.bias.data == nullptr ? nullptr : memory.bias;
  sweep.softcap = softcap_;
  sweep.chunk_keys = work.plan.chunk_keys;
  sweep.maximum = memory.maximum;
  sweep.denominator = memory.denominator;
  sweep.numerator = memory.numerator;
  sweep.scratch = memory.kernel;
  if (work.plan.few) {
    context_.kernels.attend_few_rows(sweep);
  } else {
    context_.kernels.attend_many(sweep);
  }
  for (std::int64_t r = 0; r < rows; ++r) divide(memory.numerator[r], memory.denominator[r], d);
}

}  // namespace flownpu::cpu
