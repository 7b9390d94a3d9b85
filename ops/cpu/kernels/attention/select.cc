// SPDX-License-Identifier: Apache-2.0
// Attention over a range of the KV cache: which kernel takes which cache.
#include <algorithm>
#include <cstddef>

#include "ops/cpu/kernels/attention/few_rows_int8.h"
#include "ops/cpu/kernels/attention/float.h"
#include "ops/cpu/kernels/attention/flow_kv_attention.h"
#include "ops/cpu/kernels/attention/flow_qkv_attention.h"
#include "ops/cpu/kernels/tables.h"
#if defined(__AVX512BF16__)
#include "ops/cpu/kernels/attention/avx512.h"
#include "ops/cpu/kernels/attention/few_rows_bf16_avx512.h"
#include "ops/system/processor_features.h"
#endif
#if defined(__AMX_BF16__)
#include "ops/cpu/kernels/attention/tile_rows.h"
#endif

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

void sweep_few(const AttentionSweep& sweep) {
  switch (sweep.cache_type) {
    case DataType::kBFloat16:
      return FewRows<BFloat16>(sweep).run();
    case DataType::kFloat16:
      return FewRows<Half>(sweep).run();
    case DataType::kInt8:
      return FewRowsInt8(sweep).run();
    default:
      return FewRows<Float>(sweep).run();
  }
}

// Whether any of them is infinite or NaN.
bool any_not_finite(const float* x, std::int64_t n) {
  Vector zeros{};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) zeros += load(x + i) * 0.0F;
  float zero = reduce_add(zeros);
  for (; i < n; ++i) zero += x[i] * 0.0F;
  return zero != 0;
}

// Whether a cache is multiplied as pairs of bf16: a head of odd size does not fall into pairs.
bool takes_pairs([[maybe_unused]] std::int64_t head_size, [[maybe_unused]] DataType cache_type) {
#if defined(__AVX512BF16__)
  return (cache_type == DataType::kBFloat16 || cache_type == DataType::kInt8) && head_size % 2 == 0;
#else
  return false;
#endif
}

// The fewest rows that are a part of a prompt. Fewer are tokens that are generated, or candidates
// for them, whose bits must not depend on how many there are (FewRowsBFloat16). Matrix units pay
// from here on: their order of a chunk's values takes as long as their products of some 30 rows.
constexpr std::int64_t kPromptRows = 64;

// Calls function.template operator()<Arithmetic>() with what the cache's type is multiplied as.
template <typename Function>
auto with_arithmetic([[maybe_unused]] std::int64_t rows, [[maybe_unused]] std::int64_t head_size,
                     DataType cache_type, const Function& function) {
#if defined(__AVX512BF16__)
  if (takes_pairs(head_size, cache_type) && (rows < kPromptRows || !kMultipliesFloatFaster)) {
    if (cache_type == DataType::kInt8) return function.template operator()<Int8AsBFloat16Pairs>();
    return function.template operator()<BFloat16Pairs>();
  }
#endif
  switch (cache_type) {
    case DataType::kBFloat16:
      return function.template operator()<FloatProducts<BFloat16>>();
    case DataType::kFloat16:
      return function.template operator()<FloatProducts<Half>>();
    case DataType::kInt8:
      return function.template operator()<FloatProducts<Int8>>();
    default:
      return function.template operator()<FloatProducts<Float>>();
  }
}

#if defined(__AMX_BF16__)

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

bool takes_tiles(const AttentionSweep& sweep) {
  return sweep.rows >= kPromptRows && takes_pairs(sweep.head_size, sweep.cache_type);
}

// Calls function(TileRows) for a sweep that takes tiles.
template <typename Function>
auto with_tiles(const AttentionSweep& sweep, const Function& function) {
  return with_vectors<BFloat16Pairs>(sweep.rows, [&]<int VECTORS>() {
    if (sweep.cache_type == DataType::kInt8)
      return function(TileRows<Int8AsBFloat16Pairs, AmxUnit, VECTORS>(sweep));
    return function(TileRows<BFloat16Pairs, AmxUnit, VECTORS>(sweep));
  });
}

#endif

void sweep_many(const AttentionSweep& sweep) {
#if defined(__AMX_BF16__)
  if (takes_tiles(sweep)) return with_tiles(sweep, [](auto rows) { rows.run(); });
#endif
#if defined(__AVX512BF16__)
  if (sweep.cache_type == DataType::kBFloat16 && FewRowsBFloat16::takes(sweep))
    return FewRowsBFloat16(sweep).run();
#endif
  with_arithmetic(sweep.rows, sweep.head_size, sweep.cache_type, [&]<typename Arithmetic>() {
    with_vectors<Arithmetic>(sweep.rows,
                             [&]<int VECTORS>() { ManyRows<Arithmetic, VECTORS>(sweep).run(); });
  });
}

// Computes row r by itself, over the keys that it sees.
void attend_alone(const AttentionSweep& sweep, std::int64_t r) {
  const std::int64_t first = sweep.first_key[r];
  constexpr std::int32_t kFirst = 0;
  const std::int32_t last = std::max(sweep.last_key[r] - sweep.first_key[r], 0);
  AttentionSweep alone = sweep;
  alone.query += r * sweep.head_size;
  alone.rows = 1;
  alone.maximum += r;
  alone.denominator += r;
  alone.numerator += r;
  if (sweep.blocks != nullptr) {
    alone.first_key += r;
    alone.last_key += r;
    alone.keys = sweep.last_key[r];
    return sweep_many(alone);
  }
  alone.key = static_cast<const std::byte*>(sweep.key) + first * sweep.row_bytes;
  alone.value = static_cast<const std::byte*>(sweep.value) + first * sweep.row_bytes;
  alone.position += first;
  alone.keys = last;
  alone.first_key = &kFirst;
  alone.last_key = &last;
  const float* bias = sweep.bias == nullptr ? nullptr : sweep.bias[r] + first;
  alone.bias = sweep.bias == nullptr ? nullptr : &bias;
  sweep_few(alone);
}

// Rows that are computed together multiply a value by 0 if they do not see its key. 0 times an
// infinity or NaN is NaN, so such a row is computed again by itself.
void attend_alone_where_not_finite(const AttentionSweep& sweep) {
  for (std::int64_t r = 0; r < sweep.rows; ++r) {
    const bool sees_all = sweep.first_key[r] <= sweep.begin && sweep.last_key[r] == sweep.keys;
    if (!sees_all && any_not_finite(sweep.numerator[r], sweep.head_size)) attend_alone(sweep, r);
  }
}

void attend_few_rows(const AttentionSweep& sweep) {
  sweep_few(sweep);
  attend_alone_where_not_finite(sweep);
}

void attend_many(const AttentionSweep& sweep) {
  sweep_many(sweep);
  attend_alone_where_not_finite(sweep);
}

std::int64_t scratch_of(const AttentionSweep& sweep) {
#if defined(__AMX_BF16__)
  if (takes_tiles(sweep)) return with_tiles(sweep, [](auto tiles) { return tiles.scratch(); });
#endif
  return with_arithmetic(sweep.rows, sweep.head_size, sweep.cache_type, [&]<typename Arithmetic>() {
    return with_vectors<Arithmetic>(
        sweep.rows, [&]<int VECTORS>() { return ManyRows<Arithmetic, VECTORS>(sweep).scratch(); });
  });
}

// A sweep may have fewer rows than `rows`, and needs more if its number of vectors has larger tiles
// of keys (three vectors on AVX-512 have tiles of 5, four of 4), so every number of vectors is
// asked, and the most rows that are no part of a prompt.
std::int64_t attention_scratch(std::int64_t rows, std::int64_t head_size, DataType cache_type,
                               std::int64_t chunk_keys) {
  AttentionSweep sweep;
  sweep.head_size = head_size;
  sweep.chunk_keys = chunk_keys;
  sweep.cache_type = cache_type;
  sweep.rows = std::min(rows, kPromptRows - 1);
  std::int64_t bytes = scratch_of(sweep);
  for (sweep.rows = rows; sweep.rows > 0; sweep.rows = (sweep.rows - 1) / kLanes * kLanes)
    bytes = std::max(bytes, scratch_of(sweep));
  return bytes;
}

std::int64_t attention_element(std::int64_t head_size, DataType cache_type) {
  return takes_pairs(head_size, cache_type) ? 2 : 4;
}

}  // namespace

void fill_attention(Kernels& kernels) {
  kernels.attend_few_rows = attend_few_rows;
  kernels.attend_many = attend_many;
  kernels.attention_scratch = attention_scratch;
  kernels.attention_element = attention_element;
  kernels.few_rows = kFewRows;
  kernels.block_rows = kFloatVectors * kLanes;
}

}  // namespace flownpu::cpu::FLOWNPU_ISA
