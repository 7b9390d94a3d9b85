// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/attention/plan.h"

#include <algorithm>

#include "ops/cpu/kernels.h"

namespace flownpu::cpu {
namespace {

// Rows of a tile: as many as half of the L2 has room for, with their queries and numerators. For
// each tile all its keys and values pass by, which do not fit the L2 beside it, and values are
// re-ordered, which takes as long as two rows' products. The attention of 4096 patches (16 heads of
// 72) took 6 to 9 % less with 512 rows than with 256, and some 10 % less with 1024; more were not
// tried.
constexpr std::int64_t kLeastTileRows = 256;
constexpr std::int64_t kTileRows = 1024;
// Keys of a chunk at most: a block's scores, 128 x 64 f32, are 32 KB and stay in L1. A block's
// numerators are read and written once a chunk, in which time 2 of its 64 steps of pairs could be
// multiplied.
constexpr std::int64_t kChunkKeys = 128;
constexpr std::int64_t kLeastChunkKeys = 64;
// Tasks of unequal length even out when each thread gets several, and one that the system disturbs
// gets fewer. Those of few rows are short, and a thread that waits for the others' last ones waits
// for memory to be read by fewer than can read it.
constexpr std::int64_t kTasksPerThread = 4;
constexpr std::int64_t kFewTasksPerThread = 8;
// Tokens of a call that are computed as one alone is, by attend_few, though keys then are read once
// for each few_rows / (H / G) of them: candidates for the next tokens, whose logits must be those
// of single steps. attend_many rounds queries and weights to bfloat16.
constexpr std::int64_t kFewTokens = 4;
// K and V of a part at least: 128 KB take a thread some 6 us to read at 20 GB/s, a few times what
// it takes to hand out a task and to merge its state.
constexpr std::int64_t kPartBytes = 128 * 1024;

std::int64_t divide_up(std::int64_t n, std::int64_t by) { return (n + by - 1) / by; }

// The most rows, in whole blocks, that leave every thread its tasks.
std::int64_t tile_tokens(const AttentionShape& shape, const AttentionMachine& machine) {
  if (shape.tokens <= kFewTokens && shape.heads_per_group <= machine.few_rows)
    return std::clamp<std::int64_t>(machine.few_rows / shape.heads_per_group, 1,
                                    std::max<std::int64_t>(1, shape.tokens));
  const std::int64_t rows = shape.batch * shape.kv_heads * shape.heads_per_group * shape.tokens;
  const std::int64_t blocks = rows / (machine.threads * kTasksPerThread) / machine.block_rows;
  // Queries as they come and as they are multiplied, and numerators.
  const std::int64_t row_bytes =
      shape.head_size * (2 * static_cast<std::int64_t>(sizeof(float)) + machine.element);
  const std::int64_t most =
      std::clamp(machine.cache_bytes / 2 / row_bytes / machine.block_rows * machine.block_rows,
                 kLeastTileRows, kTileRows);
  const std::int64_t tile_rows = std::clamp(blocks * machine.block_rows, machine.block_rows, most);
  return std::clamp<std::int64_t>(tile_rows / shape.heads_per_group, 1,
                                  std::max<std::int64_t>(1, shape.tokens));
}

// Half of the L2 is for re-ordered K and V and a block of scores; queries and numerators of a tile
// pass by and take the rest.
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
  // Merging costs a pass over the numerators: only where there are not half as many tasks.
  if (whole <= wanted / 2) {
    plan.parts = std::clamp<std::int64_t>(seen / part_keys, 1,
                                          divide_up(wanted, std::max<std::int64_t>(1, whole)));
  }
  plan.chunk_keys = chunk_keys(shape, machine, divide_up(seen, plan.parts));
  plan.tasks = whole * plan.parts;
  return plan;
}

}  // namespace flownpu::cpu
