// SPDX-License-Identifier: Apache-2.0
// Q4NXMatMul in AVX-512: codes are unpacked once for many rows of activations.
//
// Dataflow, for each range of columns whose unpacked codes fill the scratch (32 KB, L1), and each
// of the rows of blocks (so that a range of activations is read again while L2 has it): unpack 32
// rows of codes to bf16 pairs, then for each tile of up to kTile rows of activations: the totals
// come from `out`, each group's dots are accumulated in registers and scaled into them, and they go
// back to `out`. The order of operations for one result of bf16 activations is that of FusedDQP, so
// both give the same bits, whatever the number of rows in a call; int8 activations are multiplied
// in three ways, chosen by the number of rows (int8_order), of which FusedDQP takes few rows.
// Scratch: [column pair][even rows, odd rows][16 lanes of 32 bits].
#pragma once

#include <algorithm>

#include "ops/cpu/kernels/products/fused_dqp_avx512.h"
#include "ops/cpu/kernels/products/group_range.h"
#include "ops/cpu/kernels/products/panels/multiply.h"
#include "ops/cpu/kernels/products/panels/round.h"
#include "ops/cpu/kernels/products/q4nx_matmul_int8_avx512.h"
#include "ops/cpu/kernels/products/with_layout.h"
#include "ops/cpu/kernels/with_count.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// Bytes that 32 rows of codes take when unpacked to bf16, for one column.
constexpr std::int64_t kBFloat16ColumnBytes = q4nx::kBlockRows * 2;

template <q4nx::Layout LAYOUT>
void unpack_bf16(Q4NXRows weight, std::int64_t first_group, std::int64_t groups, std::byte* tile) {
  weight.layout = LAYOUT;
  for (std::int64_t group = first_group; group < first_group + groups; ++group) {
    for (int eight = 0; eight < 4; ++eight) {
      const EightColumns<LAYOUT> columns(weight, group, eight);
      unrolled<4>([&]<int PAIR>() {
        const BFloat16Codes weights = columns.template pair<PAIR>();
        _mm512_storeu_si512(tile, weights.even);
        _mm512_storeu_si512(tile + 64, weights.odd);
        tile += 128;
      });
    }
  }
}

template <int COUNT>
void tile_bf16(const GroupRange& range, const std::byte* tile, const RoundedActivations& a,
               std::int64_t row, float* out) {
  const auto* x = static_cast<const std::uint16_t*>(a.values) + row * a.padded_k +
                  range.first_group * q4nx::kGroup;
  const float* sums = a.sums + row * a.groups;
  Rows total[COUNT];
  if (range.first_group > 0) {
    for (int r = 0; r < COUNT; ++r) total[r] = load_rows(out + r * q4nx::kBlockRows);
  }
  for (std::int64_t g = 0; g < range.groups; ++g) {
    Rows dot[COUNT];
    for (int pair = 0; pair < q4nx::kGroup / 2; ++pair, tile += 128, x += 2) {
      const __m512i even = _mm512_load_si512(tile);
      const __m512i odd = _mm512_load_si512(tile + 64);
      for (int r = 0; r < COUNT; ++r) {
        dot_bf16(dot[r], even, odd, broadcast_activations(x + r * a.padded_k));
      }
    }
    const auto [scale, minimum] = load_parameters(range.weight, range.first_group + g);
    for (int r = 0; r < COUNT; ++r) {
      add_group(total[r], dot[r], scale, minimum, sums + r * a.groups + range.first_group + g);
    }
  }
  for (int r = 0; r < COUNT; ++r) store_rows(total[r], out + r * q4nx::kBlockRows);
}

// Up to this many rows of activations are multiplied without unpacking: dots, totals, codes and
// tables of 4 rows fit in the registers.
constexpr int kFusedRows = 4;

// Calls product.template operator()<COUNT, LAYOUT>(row of blocks, first row of activations,
// results) for each row of blocks and each tile of nearly as many rows of activations.
template <typename Product>
void multiply_fused(const Q4NXRows& weight, std::int64_t row_blocks, std::int64_t count, float* out,
                    const Product& product) {
  const std::int64_t tiles = q4nx::ceil_div(count, kFusedRows);
  with_layout(weight.layout, [&]<q4nx::Layout LAYOUT>() {
    for (std::int64_t block = 0; block < row_blocks; ++block) {
      for (std::int64_t tile = 0; tile < tiles; ++tile) {
        const std::int64_t row = count * tile / tiles;
        with_count<kFusedRows>(count * (tile + 1) / tiles - row, [&]<int COUNT>() {
          product.template operator()<COUNT, LAYOUT>(
              weight.from(block), row, out + (block * count + row) * q4nx::kBlockRows);
        });
      }
    }
  });
}

inline void matmul_bf16(const Q4NXRows& weight, std::int64_t row_blocks,
                        const RoundedActivations& a, std::int64_t first, std::int64_t count,
                        std::byte* scratch, float* out) {
  if (count <= kFusedRows) {
    return multiply_fused(
        weight, row_blocks, count, out,
        [&]<int COUNT, q4nx::Layout LAYOUT>(const Q4NXRows& blocks, std::int64_t row, float* y) {
          fused_dqp_bf16<COUNT, LAYOUT>(blocks, a, first + row, y);
        });
  }
  constexpr std::int64_t kGroups = kMatMulScratchBytes / (kBFloat16ColumnBytes * q4nx::kGroup);
  // Tiles are nearly equal: a tile of one or two rows would wait for its own dots.
  const std::int64_t tiles = q4nx::ceil_div(count, kTile);
  for (std::int64_t group = 0; group < a.filled_groups; group += kGroups) {
    for (std::int64_t block = 0; block < row_blocks; ++block) {
      const GroupRange range{weight.from(block), group, std::min(kGroups, a.filled_groups - group)};
      with_layout(weight.layout, [&]<q4nx::Layout LAYOUT>() {
        unpack_bf16<LAYOUT>(range.weight, group, range.groups, scratch);
      });
      float* y = out + block * count * q4nx::kBlockRows;
      for (std::int64_t tile = 0; tile < tiles; ++tile) {
        const std::int64_t begin = count * tile / tiles;
        with_count<kTile>(count * (tile + 1) / tiles - begin, [&]<int COUNT>() {
          tile_bf16<COUNT>(range, scratch, a, first + begin, y + begin * q4nx::kBlockRows);
        });
      }
    }
  }
}

// The most rows in panels. For more rows, rounding weights to 8 bits once costs less than scaling
// each row's dots (q4nx_matmul_int8_avx512.h). On a Granite Rapids core weights with minima are
// multiplied as fast both ways by 32 rows, symmetric ones by 50.
constexpr std::int64_t kMostPanelRows = 32;

// The most rows of a weight of 8 bits, or with a table, that are multiplied like a few rows, tile
// by tile: codes of 8 bits need no unpacking. More rows are multiplied faster by codes of one scale
// for 256 columns (a Granite Rapids core, 32 rows: 203 against 148 GMAC/s, 12 rows: 143).
constexpr std::int64_t kMostByteRows = 16;

inline Int8Order int8_order(std::int64_t rows, const q4nx::Layout& layout) {
  if (layout.is_signed()) return rows <= kMostByteRows ? Int8Order::kGroups : Int8Order::kParts;
  return rows <= kFusedRows       ? Int8Order::kGroups
         : rows <= kMostPanelRows ? Int8Order::kPanels
                                  : Int8Order::kParts;
}

// Rounds weights to 8 bits and calls multiply(range, fetch, out[count][32]) for each range of
// each row of blocks; `fetch` fetches the next range in `steps` steps.
template <typename Multiply>
void for_each_range(const Q4NXRows& weight, std::int64_t row_blocks, const RoundedActivations& a,
                    std::int64_t count, std::int64_t steps, std::byte* scratch, float* out,
                    const Multiply& multiply) {
  const std::int64_t parts = a.groups / kGroupsPerPart;
  // The next range is that of the next row of blocks, or the next columns of all rows. After the
  // last range, most likely the following rows of blocks are next.
  const auto next_range = [&](std::int64_t part, std::int64_t block) {
    if (++block == row_blocks) {
      part += kByteParts;
      block = part < parts ? 0 : row_blocks;
      part = part < parts ? part : 0;
    }
    const Q4NXRows row = weight.from(block);
    const std::int64_t end = std::min((part + kByteParts) * kGroupsPerPart, weight.stored_groups);
    const std::uint8_t* start = row.scales(part * kGroupsPerPart);
    return RangeFetch(start, row.scales(end) - start, steps);
  };
  for (std::int64_t part = 0; part < parts; part += kByteParts) {
    for (std::int64_t block = 0; block < row_blocks; ++block) {
      const BytePartRange range = unpack_int8(weight.from(block), part, a, scratch);
      multiply(range, next_range(part, block), out + block * count * q4nx::kBlockRows);
    }
  }
}

inline void multiply_bytes(const Q4NXRows& weight, std::int64_t row_blocks,
                           const RoundedActivations& a, std::int64_t first, std::int64_t count,
                           std::byte* scratch, float* out) {
  for_each_range(
      weight, row_blocks, a, count, q4nx::ceil_div(count, kTile) * kByteParts, scratch, out,
      [&](const BytePartRange& range, RangeFetch fetch, float* y) {
        for (std::int64_t row = 0; row < count; row += kTile, y += kTile * q4nx::kBlockRows) {
          with_count<kTile>(std::min<std::int64_t>(kTile, count - row), [&]<int COUNT>() {
            tile_int8<COUNT>(range, a, first + row, fetch, y);
          });
        }
      });
}

inline void matmul_int8(const Q4NXRows& weight, std::int64_t row_blocks,
                        const RoundedActivations& a, std::int64_t first, std::int64_t count,
                        std::byte* scratch, float* out) {
  switch (a.order) {
    case Int8Order::kGroups:
      return multiply_fused(
          weight, row_blocks, count, out,
          [&]<int COUNT, q4nx::Layout LAYOUT>(const Q4NXRows& blocks, std::int64_t row, float* y) {
            fused_dqp_int8<COUNT, LAYOUT>(blocks, a, first + row, y);
          });
    case Int8Order::kPanels:
      return with_four_bit_layout(weight.layout, [&]<q4nx::Layout LAYOUT>() {
        multiply_panels<LAYOUT>(weight, row_blocks, a, first, count, scratch, out);
      });
    case Int8Order::kParts:
      return multiply_bytes(weight, row_blocks, a, first, count, scratch, out);
  }
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
