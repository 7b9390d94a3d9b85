// SPDX-License-Identifier: Apache-2.0
// Products of many rows, whose weights are rounded to 8 bits, by AMX: the same integers, and so the
// same bits, as by dot products of vectors (q4nx_matmul_int8_avx512.h, which says what is
// computed).
//
// Dataflow, for each range of 8-bit codes, each part of columns (whose codes stay in L1) and each
// 32 rows of activations: four tiles of dots (two tiles of activations times the even and the odd
// rows of the weight) are summed 64 columns at a time, stored to memory, and scaled from there into
// `out`.
#pragma once

#include <algorithm>

#include "ops/cpu/kernels/products/amx/tiles.h"
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

inline void multiply_bytes_tiles(const Q4NXRows& weight, std::int64_t row_blocks,
                                 const RoundedActivations& a, std::int64_t first,
                                 std::int64_t count, std::byte* scratch, float* out) {
  const std::int64_t rows = std::min(count, kPartsRows);
  const std::int64_t tiles = q4nx::ceil_div(count, rows);
  const Tiles configured(std::min(rows, kTileRows), rows - std::min(rows, kTileRows));
  const std::int8_t* x = static_cast<const std::int8_t*>(a.values) + first * a.padded_k;
  // The last tiles begin so that they end with the last row; the rows in them that are done already
  // are skipped.
  const auto first_row = [&](std::int64_t tile) { return std::min(tile * rows, count - rows); };
  for_each_range(
      weight, row_blocks, a, count, tiles * kByteParts * kPartPairs, scratch, out,
      [&](const BytePartRange& range, RangeFetch fetch, float* y) {
        for (std::int64_t p = 0; p < range.parts; ++p) {
          const std::int64_t part = range.first_part + p;
          const std::int64_t groups = std::min(kGroupsPerPart, range.groups - p * kGroupsPerPart);
          const PartResults results(range.parameters[p], a, first, part);
          for (std::int64_t tile = 0; tile < tiles; ++tile) {
            const std::int64_t begin = first_row(tile);
            PartDots dots;
            dot_part_tiles(range.codes + p * kBytePartBytes, groups,
                           x + begin * a.padded_k + part * kPartColumns, a.padded_k, rows, fetch,
                           dots);
            for (std::int64_t r = tile * rows; r < begin + rows; ++r)
              results.add({dots.even[r - begin], dots.odd[r - begin]}, r, y + r * q4nx::kBlockRows);
          }
        }
      });
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
