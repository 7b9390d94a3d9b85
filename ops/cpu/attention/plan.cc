// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/attention/plan.h"

#include <algorithm>

#include "ops/cpu/kernels.h"

namespace flownpu::cpu {
namespace {

// Bounds for the rows of a tile. Rows, with their queries and numerators, fill half of the L2.
// Larger tiles save work. Each tile reads all its keys and values again, because they do not fit
// into the L2 beside it. It also re-orders values, which takes as long as the products of two rows.
// The attention of 4096 patches (16 heads of 72) took 6 to 9 % less time with 512 rows than with
// 256, and some 10 % less with 1024; more were not tried.
constexpr std::int64_t kLeastTileRows = 256;
constexpr std::int64_t kTileRows = 1024;
// The most, and the fewest, keys of a chunk: a block's scores, 128 x 64 f32, are 32 KB and stay in
// L1. Numerators are read and written once a chunk. That takes as long as 2 of the chunk's 64 steps
// of a pair of keys.
constexpr std::int64_t kChunkKeys = 128;
constexpr std::int64_t kLeastChunkKeys = 64;
// Tasks for each thread. With several tasks, unequal lengths even out, and a disturbed thread gets
// fewer of them. Tasks of few rows are short and wait for memory. With more of these tasks, fewer
// threads idle at the end, while memory still has bandwidth left.
constexpr std::int64_t kTasksPerThread = 4;
constexpr std::int64_t kFewTasksPerThread = 8;
// attend_few_rows computes calls of up to this many tokens, as it does a single token. Keys are
// then read once for each few_rows / (H / G) tokens. Such tokens are candidates for the next
// tokens. Their logits must equal those of single steps, but attend_many rounds queries and weights
// to bfloat16.
constexpr std::int64_t kFewTokens = 4;
// The fewest bytes of K and V in a part. A thread reads 128 KB in some 6 us at 20 GB/s, a few times
// as long as handing out a task and merging its state.
constexpr std::int64_t kPartBytes = 128 * 1024;

std::int64_t divide_up(std::int64_t n, std::int64_t by) { return (n + by - 1) / by; }

// Tokens of a tile: as many whole blocks of rows as leave enough tasks for every thread.
std::int64_t tile_tokens(const AttentionShape& shape, const AttentionMachine& machine) {
  if (shape.tokens <= kFewTokens && shape.heads_per_group <= machine.few_rows)
    return std::clamp<std::int64_t>(machine.few_rows / shape.heads_per_group, 1,
                                    std::max<std::int64_t>(1, shape.tokens));
  const std::int64_t rows = shape.batch * shape.kv_heads * shape.heads_per_group * shape.tokens;
  const std::int64_t blocks = rows / (machine.threads * kTasksPerThread) / machine.block_rows;
  // For each row: its query in f32, its query as it is multiplied, and its numerator in f32.
  const std::int64_t row_bytes =
      shape.head_size * (2 * static_cast<std::int64_t>(sizeof(float)) + machine.element);
  const std::int64_t most =
      std::clamp(machine.cache_bytes / 2 / row_bytes / machine.block_rows * machine.block_rows,
                 kLeastTileRows, kTileRows);
  const std::int64_t tile_rows = std::clamp(blocks * machine.block_rows, machine.block_rows, most);
  return std::clamp<std::int64_t>(tile_rows / shape.heads_per_group, 1,
                                  std::max<std::int64_t>(1, shape.tokens));
}

// Keys of a chunk. Half of the L2 is for its re-ordered K and V and a block of scores; the queries
// and numerators of a tile pass through the other half.
std::int64_t chunk_keys(const AttentionShape& shape, const AttentionMachine& machine,
                        std::int64_t seen) {
  const std::int64_t key_bytes = 2 * shape.head_size * machine.element +
                                 machine.block_rows * static_cast<std::int64_t>(sizeof(float));
  const std::int64_t most =
      std::clamp(machine.cache_bytes / 2 / key_bytes, kLeastChunkKeys, kChunkKeys);
  // Chunks of even length.
  const std::int64_t chunks = std::max<std::int64_t>(1, divide_up(seen, most));
  return divide_up(divide_up(seen, chunks), kAttentionKeyStep) * kAttentionKeyStep;
}

}  // namespace

AttentionPlan plan_attention(const AttentionShape& shape, const AttentionMachine& machine) {
  AttentionPlan plan{};
  plan.tile_tokens = tile_tokens(shape, machine);
  const std::int64_t rows = plan.tile_tokens * shape.heads_per_group;
  plan.few = rows <= machine.few_rows;
  plan.tiles = divide_up(shape.tokens, plan.tile_tokens);
  // The keys that a tile sees at most.
  const std::int64_t seen =
      shape.window > 0 ? std::min(shape.total, shape.window + plan.tile_tokens - 1) : shape.total;
  const std::int64_t whole = shape.batch * shape.kv_heads * plan.tiles;
  const std::int64_t wanted =
      machine.threads > 1 ? machine.threads * (plan.few ? kFewTasksPerThread : kTasksPerThread) : 1;
  const std::int64_t part_keys = std::max<std::int64_t>(1, kPartBytes / (2 * shape.row_bytes));
  plan.parts = 1;
  // Merging costs a pass over the numerators, so keys are cut only if tiles give at most half of
  // the wanted tasks.
  if (whole <= wanted / 2) {
    plan.parts = std::clamp<std::int64_t>(seen / part_keys, 1,
                                          divide_up(wanted, std::max<std::int64_t>(1, whole)));
  }
  plan.chunk_keys = chunk_keys(shape, machine, divide_up(seen, plan.parts));
  plan.tasks = whole * plan.parts;
  return plan;
}

}  // namespace flownpu::cpu
