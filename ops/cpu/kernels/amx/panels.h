// SPDX-License-Identifier: Apache-2.0
// Products of rows in panels by AMX: the same integers, and so the same bits, as by dot products of
// vectors (panels/multiply.h, which says what is computed).
//
// A tile instruction multiplies a row of activations by a row of the weight and sums over a pair of
// groups, whose scales differ. So a tile of weights has columns of the one group and of the other
// in turn, with zeros where a column meets the other group's activations: half of the products are
// lost, of eight times as many as vectors compute in the same time. Most of the time goes into
// moving codes and dots from vectors to tiles and back, in which tiles and vectors do not overlap.
//
// Dataflow, for each pair of groups in each strip of each part: codes less 8 are stored as two
// tiles of weights (rows 0, 2, .. and 1, 3, .. of the strip); these are multiplied by up to 32 rows
// of activations, and the dots stored to memory; and row by row dots are scaled into totals. A core
// does not load into a tile what it has just stored, nor from memory what it has just stored from a
// tile, before the caches have it: so these are three stages, each one pair behind the one before.
#pragma once

#include <algorithm>

#include "ops/cpu/kernels/amx/tiles.h"
#include "ops/cpu/kernels/products/panels/multiply.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// Rows of activations that are multiplied together.
constexpr std::int64_t kPanelsRows = 2 * kTileRows;

// The lanes of one group of a pair, and those of the other.
constexpr __mmask64 kOneLanes = 0x0f0f0f0f0f0f0f0f;
constexpr __mmask64 kOtherLanes = ~kOneLanes;

// The data that one stage passes to the next, for two consecutive pairs.
struct alignas(64) PanelTiles {
  struct Codes {
    // [four columns of the one group, of the other][lanes]: PairCodes less 8; lanes of the other
    // group are 0.
    std::byte even[kTileRows][kTileBytes];
    std::byte odd[kTileRows][kTileBytes];
  };
  struct Dots {
    __m512i even[kPanelsRows];
    __m512i odd[kPanelsRows];
  };
  Codes codes[2];
  Dots dots[2];
  // The totals of a strip so far.
  __m512i totals[kPanelsRows];
  __m512i zeros = _mm512_setzero_si512();
};

inline void store_codes(const PackedPair& packed, Fetch lines, PanelTiles::Codes& to) {
  const __m512i middle = _mm512_set1_epi8(8);
  const auto store = [&](std::byte* rows, __m512i both) {
    _mm512_store_si512(rows, _mm512_maskz_sub_epi8(kOneLanes, both, middle));
    _mm512_store_si512(rows + kTileBytes, _mm512_maskz_sub_epi8(kOtherLanes, both, middle));
  };
#pragma GCC unroll 8
  for (int quad = 0; quad < kQuads; ++quad) {
    lines.step();
    const PairCodes codes = packed.unpack(quad);
    store(to.even[2 * quad], codes.even);
    store(to.odd[2 * quad], codes.odd);
  }
  lines.rest();
}

// On a Granite Rapids two tiles of dots take 58 cycles when they are cleared and 76 when zeros are
// loaded; four begun at once 139 and 60. So the second two are loaded.
template <Tile X, Tile EVEN, Tile ODD>
inline void dot_tile(const std::int8_t* x, const __m512i& zeros, __m512i* even, __m512i* odd) {
  load_tile<X>(x, kPartColumns);
  if constexpr (X == kX0) {
    clear_tile<EVEN>();
    clear_tile<ODD>();
  } else {
    load_tile<EVEN>(&zeros, 0);
    load_tile<ODD>(&zeros, 0);
  }
  dot_signed<EVEN, X, kEven>();
  dot_signed<ODD, X, kOdd>();
  store_tile<EVEN>(even, kTileBytes);
  store_tile<ODD>(odd, kTileBytes);
}

inline void dot_codes(const PanelTiles::Codes& codes, const std::int8_t* x, std::int64_t rows,
                      const __m512i& zeros, PanelTiles::Dots& to) {
  load_tile<kEven>(codes.even, kTileBytes);
  load_tile<kOdd>(codes.odd, kTileBytes);
  dot_tile<kX0, kEven0, kOdd0>(x, zeros, to.even, to.odd);
  if (rows > kTileRows) {
    dot_tile<kX1, kEven1, kOdd1>(x + kTileRows * kPartColumns, zeros, to.even + kTileRows,
                                 to.odd + kTileRows);
  }
}

// Multiplies a part in the first row of blocks by `count` rows in panels.
template <q4nx::Layout LAYOUT>
void multiply_part_tiles(const PartGroups& groups, PartWeights& w, PanelRows x, std::int64_t count,
                         PartOrder order, Fetch fetch, PanelTiles& tiles, float* out) {
  prepare_part<LAYOUT>(groups, w);
  const std::int64_t pairs = groups.pairs();
  for (std::int64_t step = 0; step < 2 * pairs + 2; ++step) {
    if (step < 2 * pairs) {
      store_codes(groups.packed<LAYOUT>(step % pairs, static_cast<int>(step / pairs)),
                  fetch.from(step * kGroupBytes<LAYOUT>), tiles.codes[step % 2]);
    }
    if (step > 0 && step <= 2 * pairs) {
      dot_codes(tiles.codes[(step - 1) % 2], x.values() + (step - 1) % pairs * kTileBytes, count,
                tiles.zeros, tiles.dots[(step - 1) % 2]);
    }
    if (step < 2) continue;
    const std::int64_t pair = (step - 2) % pairs;
    const int strip = static_cast<int>((step - 2) / pairs);
    const PanelTiles::Dots& dots = tiles.dots[step % 2];
    const __m512i scales = w.scales[strip][pair];
    if (pair + 1 < pairs) {
      for (std::int64_t r = 0; r < count; ++r) {
        const __m512i before = pair == 0 ? _mm512_setzero_si512() : tiles.totals[r];
        tiles.totals[r] =
            _mm512_dpwssd_epi32(before, _mm512_packs_epi32(dots.even[r], dots.odd[r]), scales);
      }
      continue;
    }
    for (std::int64_t r = 0; r < count; ++r) {
      const __m512i before = pair == 0 ? _mm512_setzero_si512() : tiles.totals[r];
      const __m512i total[1] = {
          _mm512_dpwssd_epi32(before, _mm512_packs_epi32(dots.even[r], dots.odd[r]), scales)};
      add_totals<1, LAYOUT>(groups, w, strip, x.from(r), order, total, out + r * q4nx::kBlockRows);
    }
  }
}

// For up to kPanelsRows rows.
template <q4nx::Layout LAYOUT>
void multiply_panels_tiles(const Q4NXRows& weight, std::int64_t row_blocks,
                           const RoundedActivations& a, std::int64_t first, std::int64_t count,
                           float* out) {
  const Tiles configured(std::min(count, kTileRows), count - std::min(count, kTileRows));
  PartWeights w;
  PanelTiles tiles;
  for_each_part<LAYOUT>(
      weight, row_blocks, a, count, out,
      [&](const PartGroups& groups, std::int64_t part, PartOrder order, Fetch fetch, float* y) {
        multiply_part_tiles<LAYOUT>(groups, w, PanelRows(a.panels, part, first), count, order,
                                    fetch, tiles, y);
      });
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
