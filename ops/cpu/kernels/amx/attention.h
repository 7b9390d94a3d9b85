// SPDX-License-Identifier: Apache-2.0
// Attention of prompts by AMX (tile_rows.h), and by AVX-512 where tiles do not pay or fit.
#pragma once

#include <algorithm>

#include "ops/cpu/kernels/amx/tile_rows.h"
#include "ops/cpu/kernels/amx/tiles.h"
#include "ops/cpu/kernels/attention/alone.h"
#include "ops/cpu/kernels/attention/avx512.h"

namespace flownpu::cpu {
namespace avx512 {
const Kernels& kernels();
}

namespace FLOWNPU_ISA {
namespace {

struct AmxUnit {
  const Tiles configured{kTileRows, kTileRows};

  template <Tile TILE>
  static void load(const void* from, std::int64_t stride) {
    load_tile<TILE>(from, stride);
  }
  template <Tile TILE>
  static void store(void* to, std::int64_t stride) {
    store_tile<TILE>(to, stride);
  }
  template <Tile TILE>
  static void clear() {
    clear_tile<TILE>();
  }
  template <Tile DOTS, Tile X, Tile WEIGHTS>
  static void dot() {
    dot_bf16<DOTS, X, WEIGHTS>();
  }
};

inline bool takes_tiles(const AttentionSweep& sweep) {
  return sweep.rows >= kPromptRows && takes_pairs(sweep.head_size, sweep.cache_type);
}

// Calls function(TileRows) for a sweep that takes tiles.
template <typename Function>
auto with_tiles(const AttentionSweep& sweep, const Function& function) {
  return with_vectors<BFloat16Pairs>(sweep.rows, [&]<int VECTORS>() {
    return function(TileRows<BFloat16Pairs, AmxUnit, VECTORS>(sweep));
  });
}

inline void attend_many(const AttentionSweep& sweep) {
  const Kernels& vectors = avx512::kernels();
  if (!takes_tiles(sweep)) return vectors.attend_many(sweep);
  with_tiles(sweep, [](auto rows) { rows.run(); });
  attend_alone_where_not_finite(sweep, vectors.attend_few_rows, vectors.attend_many);
}

inline std::int64_t attention_scratch(std::int64_t rows, std::int64_t head_size,
                                      DataType cache_type, std::int64_t chunk_keys) {
  const std::int64_t vectors =
      avx512::kernels().attention_scratch(rows, head_size, cache_type, chunk_keys);
  const std::int64_t tiles =
      most_scratch(rows, head_size, cache_type, chunk_keys, [](const AttentionSweep& sweep) {
        if (!takes_tiles(sweep)) return std::int64_t{0};
        return with_tiles(sweep, [](auto of_tiles) { return of_tiles.scratch(); });
      });
  return std::max(vectors, tiles);
}

}  // namespace
}  // namespace FLOWNPU_ISA
}  // namespace flownpu::cpu
