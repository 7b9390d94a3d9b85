// SPDX-License-Identifier: Apache-2.0
// Products of many rows, whose weights are rounded to 8 bits, by AMX: the same integers, and so the
// same bits, as by dot products of vectors (q4nx_matmul_int8_avx512.h and dense/matmul_avx512.h,
// which say what is computed).
//
// Dataflow, for each range of 8-bit codes, each part of columns (whose codes stay in L1) and each
// 32 rows of activations: four tiles of dots (two tiles of activations times the even and the odd
// rows of the weight) are summed 64 columns at a time, stored to memory, and scaled from there into
// `out`.
#pragma once

#include <algorithm>

#include "ops/cpu/kernels/amx/tiles.h"
#include "ops/cpu/kernels/products/dense/matmul_avx512.h"
#include "ops/cpu/kernels/products/q4nx_matmul_avx512.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// Rows of activations that are multiplied together.
constexpr std::int64_t kPartsRows = 2 * kTileRows;

struct PartDots {
  __m512i even[kPartsRows];
  __m512i odd[kPartsRows];
};

// `x` is the first of `rows` rows of activations. Columns past the last group have the codes that
// were there before; their activations are 0.
inline void dot_part_tiles(const std::byte* codes, std::int64_t groups, const std::int8_t* x,
                           std::int64_t x_stride, std::int64_t rows, RangeFetch& fetch,
                           PartDots& dots) {
  constexpr std::int64_t kQuadBytes = 2 * kTileBytes;
  clear_tile<kEven0>();
  clear_tile<kOdd0>();
  if (rows > kTileRows) {
    clear_tile<kEven1>();
    clear_tile<kOdd1>();
  }
  for (std::int64_t pair = 0; pair < q4nx::ceil_div(groups, 2); ++pair) {
    fetch.step();
    load_tile<kX0>(x, x_stride);
    load_tile<kEven>(codes, kQuadBytes);
    dot_unsigned<kEven0, kX0, kEven>();
    load_tile<kOdd>(codes + kTileBytes, kQuadBytes);
    dot_unsigned<kOdd0, kX0, kOdd>();
    if (rows > kTileRows) {
      load_tile<kX1>(x + kTileRows * x_stride, x_stride);
      dot_unsigned<kEven1, kX1, kEven>();
      dot_unsigned<kOdd1, kX1, kOdd>();
    }
    x += kTileBytes;
    codes += kTileRows * kQuadBytes;
  }
  store_tile<kEven0>(dots.even, kTileBytes);
  store_tile<kOdd0>(dots.odd, kTileBytes);
  if (rows <= kTileRows) return;
  store_tile<kEven1>(dots.even + kTileRows, kTileBytes);
  store_tile<kOdd1>(dots.odd + kTileRows, kTileBytes);
}

// Products of `count` rows from `first` on with a range of parts of columns, added to `out`
// from the second part on. A core does not load from memory what it has just stored from a tile
// before the caches have it: so dots are scaled while the next ones are made.
inline void multiply_range_tiles(const BytePartRange& range, const RoundedActivations& a,
                                 std::int64_t first, std::int64_t count, RangeFetch& fetch,
                                 float* out) {
  const std::int64_t part = a.part_columns;
  const std::int64_t part_groups = part / q4nx::kGroup;
  const std::int64_t rows = std::min(count, kPartsRows);
  const std::int64_t tiles = q4nx::ceil_div(count, rows);
  const std::int8_t* x =
      static_cast<const std::int8_t*>(a.values) + first * a.padded_k + range.first_part * part;
  // The last tiles begin so that they end with the last row; the rows in them that are done already
  // are skipped.
  const auto first_row = [&](std::int64_t tile) { return std::min(tile * rows, count - rows); };
  PartDots dots[2];
  const std::int64_t steps = range.parts * tiles;
  for (std::int64_t step = 0; step <= steps; ++step) {
    if (step < steps) {
      const std::int64_t p = step / tiles;
      dot_part_tiles(range.codes + p * part * q4nx::kBlockRows,
                     std::min(part_groups, range.groups - p * part_groups),
                     x + first_row(step % tiles) * a.padded_k + p * part, a.padded_k, rows, fetch,
                     dots[step % 2]);
    }
    if (step == 0) continue;
    const std::int64_t p = (step - 1) / tiles;
    const std::int64_t tile = (step - 1) % tiles;
    const PartResults results(range.parameters[p], a, first, range.first_part + p);
    const PartDots& made = dots[(step - 1) % 2];
    const std::int64_t begin = first_row(tile);
    for (std::int64_t r = tile * rows; r < begin + rows; ++r)
      results.add({made.even[r - begin], made.odd[r - begin]}, r, out + r * q4nx::kBlockRows);
  }
}

// Tiles for `count` rows, taken kPartsRows at a time.
inline Tiles tiles_for(std::int64_t count) {
  const std::int64_t rows = std::min(count, kPartsRows);
  return {std::min(rows, kTileRows), rows - std::min(rows, kTileRows)};
}

inline void multiply_bytes_tiles(const Q4NXRows& weight, std::int64_t row_blocks,
                                 const RoundedActivations& a, std::int64_t first,
                                 std::int64_t count, std::byte* scratch, float* out) {
  const Tiles configured = tiles_for(count);
  const std::int64_t tiles = q4nx::ceil_div(count, kPartsRows);
  for_each_range(weight, row_blocks, a, count, tiles * kByteParts * kPartPairs, scratch, out,
                 [&](const BytePartRange& range, RangeFetch fetch, float* y) {
                   multiply_range_tiles(range, a, first, count, fetch, y);
                 });
}

inline void multiply_dense_tiles(const std::byte* packed, const RoundedActivations& a,
                                 std::int64_t first, std::int64_t count, float* out) {
  const Tiles configured = tiles_for(count);
  const std::int64_t tiles = q4nx::ceil_div(count, kPartsRows);
  for_each_dense_range(packed, a, tiles * parts_of_range(a) * a.part_columns / kTileBytes,
                       [&](const BytePartRange& range, RangeFetch fetch) {
                         multiply_range_tiles(range, a, first, count, fetch, out);
                       });
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
