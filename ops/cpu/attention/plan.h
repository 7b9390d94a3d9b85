// SPDX-License-Identifier: Apache-2.0
// How attention is cut into tasks: a pure function of shapes and of the machine.
//
// A task is a tile of queries, of all heads that share a KV head, and a part of the tile's keys. If
// there is one part, the task's result is final; otherwise eq. 9-12 merge the parts.
#pragma once

#include <cstdint>

namespace flownpu::cpu {

struct AttentionShape {
  std::int64_t batch;
  std::int64_t kv_heads;
  std::int64_t heads_per_group;
  std::int64_t head_size;
  // S, the new tokens; and T, all tokens so far, the new ones included.
  std::int64_t tokens;
  std::int64_t total;
  // W, or 0 for none.
  std::int64_t window;
  // Bytes of a row of K, or of V, in the cache.
  std::int64_t row_bytes;
};

struct AttentionMachine {
  std::int64_t threads;
  // L2, of one core.
  std::int64_t cache_bytes;
  // Sizes that the kernels want: see Kernels.
  std::int64_t few_rows;
  std::int64_t block_rows;
  // Bytes of an element that attend_many multiplies.
  std::int64_t element;
};

struct AttentionPlan {
  // Whether attend_few_rows takes the rows of a tile.
  bool few;
  std::int64_t tile_tokens;
  // Tiles of one KV head of one row of the batch.
  std::int64_t tiles;
  // Parts of the keys that a tile sees.
  std::int64_t parts;
  std::int64_t chunk_keys;
  std::int64_t tasks;
};

AttentionPlan plan_attention(const AttentionShape& shape, const AttentionMachine& machine);

}  // namespace flownpu::cpu
