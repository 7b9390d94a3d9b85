// SPDX-License-Identifier: Apache-2.0
// Q4NXMatMul of int8 activations in AVX-512, for more rows than FusedDQP takes: 4-bit codes are
// unpacked once for all rows, and their dots scaled as integers.
//
// Each group of 32 columns has scales of its own. To apply them to its dots in f32 takes half as
// many instructions as the dots themselves. So the weights of a row in a part of 256 columns get
// one step, a power of two, and the scales of its 8 groups become integers, multiples of it. A dot
// of 32 activations up to 127 with codes less 8 is at most 127 x 32 x 8 = 32512 and fits 16 bits:
// the dots of two groups are packed side by side, and one instruction multiplies both by their
// scales and adds them up.
//
// The step is 2^-12 of the power of two 2^e of the row's largest scale in the part, so that scales
// are below 2^13, and the sum of a part below 8 x 32512 x 2^13 < 2^31. A scale is a bf16, which has
// 8 significant bits: it is a multiple of the step, and nothing is rounded, unless it is below 2^-5
// of 2^e; then it is off by half a step at most. The codes less 8 leave `minimum + 8 scale` of a
// group's minimum, which is 0 in symmetric weights, and multiplies the group's sum in f32.
//
// Activations have one scale for each 256 columns, too, and lie in panels (Int8Panels).
//
// Dataflow, for each row of blocks and each part: unpack 32 rows x 256 columns into the scratch
// (PartWeights, 10 KB, for L1), then for each tile of up to kPanelTile rows of activations and each
// strip of 16 rows: dots in registers, two groups at a time, scaled into totals in registers, and
// those times both scales into `out`.
#pragma once

#include <algorithm>

#include "ops/cpu/kernels.h"
#include "ops/cpu/kernels/products/q4nx_avx512.h"
#include "ops/cpu/kernels/products/with_layout.h"
#include "ops/cpu/kernels/with_count.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// 8 x 2 dots, 8 totals, two registers of codes and one of activations are 27 of 32 registers.
constexpr int kPanelTile = 8;
constexpr int kPartPairs = static_cast<int>(kGroupsPerPart) / 2;
constexpr int kQuads = static_cast<int>(q4nx::kGroup) / 4;

// 32 rows of the weight x 256 columns. Packing puts the dots of 16 rows into the order 0, 2, 1, 3
// of each four; everything here that is [16] is in this order.
struct alignas(64) PartWeights {
  // Codes of two groups: lane 2 i has four columns of the one and lane 2 i + 1 the same four of the
  // other, of row 2 i of the strip, and then of row 2 i + 1.
  std::byte codes[2][kPartPairs][kQuads][2][64];
  // 16 bits for each of two groups, [16].
  __m512i scales[2][kPartPairs];
  // f32 [16].
  __m512 steps[2];
  __m512 minima[2][kGroupsPerPart];
};
static_assert(sizeof(PartWeights) <= kMatMulScratchBytes);

// Rows 0, 2, 1, 3 of each four; and back.
inline __m512i reorder(__m512i rows) {
  return _mm512_shuffle_epi32(rows, static_cast<_MM_PERM_ENUM>(0xd8));
}
inline __m512 reorder(__m512 rows) { return _mm512_permute_ps(rows, 0xd8); }

// 16 bf16 -> f32.
inline __m512 load_strip_rows(const std::uint8_t* bf16) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bf16));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

// The step of 16 rows, and its inverse.
struct Step16 {
  __m512 step;
  __m512 inverse;
};

// That for the largest magnitudes of the scales, bits of f32. That of an infinite scale, or NaN, is
// this number, which makes no number of what it multiplies.
inline Step16 step_of(__m512i largest) {
  constexpr int kExponent = 23;
  // Smaller ones would have inverses beyond f32: 2^-100, less than any weight that matters.
  const __m512i least = _mm512_set1_epi32((127 - 100) << kExponent);
  const __m512i infinity = _mm512_set1_epi32(0xff << kExponent);
  const __m512i power = _mm512_and_si512(_mm512_max_epi32(largest, least), infinity);
  const __m512i step = _mm512_sub_epi32(power, _mm512_set1_epi32(12 << kExponent));
  const __m512i inverse = _mm512_sub_epi32(_mm512_set1_epi32(2 * 127 << kExponent), step);
  const __mmask16 no_number = _mm512_cmpeq_epi32_mask(power, infinity);
  return {_mm512_castsi512_ps(_mm512_mask_mov_epi32(step, no_number, largest)),
          _mm512_castsi512_ps(inverse)};
}

// The steps of both strips of `groups` groups.
inline void find_steps(const Q4NXRows& weight, std::int64_t first_group, std::int64_t groups,
                       Step16 (&steps)[2]) {
  // bf16 without their signs have the order of integers, and NaN is the largest.
  __m512i largest = _mm512_setzero_si512();
  for (std::int64_t g = first_group; g < first_group + groups; ++g) {
    const __m512i magnitudes =
        _mm512_and_si512(_mm512_loadu_si512(weight.scales(g)), _mm512_set1_epi16(0x7fff));
    largest = _mm512_max_epu16(largest, magnitudes);
  }
  const auto widen = [](__m256i halves) {
    return _mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
  };
  steps[0] = step_of(widen(_mm512_castsi512_si256(largest)));
  steps[1] = step_of(widen(_mm512_extracti64x4_epi64(largest, 1)));
}

// vpermb indices: 4 columns of 8 row pairs of one group, then of another -> lane 2 i: the row pair
// i of the one, lane 2 i + 1: of the other.
constexpr ColumnIndex pair_index() {
  ColumnIndex index{};
  for (int lane = 0; lane < 16; ++lane) {
    for (int column = 0; column < 4; ++column)
      index.bytes[4 * lane + column] =
          static_cast<std::uint8_t>(lane % 2 * 32 + column * 8 + lane / 2);
  }
  return index;
}
constexpr ColumnIndex kPairIndex = pair_index();

// Two groups' codes of a strip.
inline void unpack_pair(const std::uint8_t* one, const std::uint8_t* other,
                        std::byte (&codes)[kQuads][2][64]) {
  const __m512i index = load_index(kPairIndex);
  const __m512i nibble = _mm512_set1_epi8(0x0f);
  const auto load = [](const std::uint8_t* quad) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(quad));
  };
  constexpr int kQuadBytes = 4 * static_cast<int>(q4nx::kColumnBytes);
  for (int quad = 0; quad < kQuads; ++quad) {
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(load(one + quad * kQuadBytes)),
                                            load(other + quad * kQuadBytes), 1);
    const __m512i bytes = _mm512_permutexvar_epi8(index, both);
    _mm512_store_si512(codes[quad][0], _mm512_and_si512(bytes, nibble));
    _mm512_store_si512(codes[quad][1], _mm512_and_si512(_mm512_srli_epi16(bytes, 4), nibble));
  }
}

template <q4nx::Layout LAYOUT>
void unpack_with_steps(Q4NXRows weight, std::int64_t first_group, std::int64_t groups,
                       PartWeights& out) {
  weight.layout = LAYOUT;
  Step16 steps[2];
  find_steps(weight, first_group, groups, steps);
  for (int strip = 0; strip < 2; ++strip) {
    out.steps[strip] = reorder(steps[strip].step);
    const auto at = [&](const std::uint8_t* bf16) {
      return load_strip_rows(bf16 + strip * q4nx::kStripRows * 2);
    };
    // Group g's scale in steps; and what is left of its minimum. A scale is 0, and nothing is left,
    // where there is no such group: K may end with an odd one.
    const auto scale_of = [&](std::int64_t g) {
      if (g == groups) {
        if constexpr (LAYOUT.has_minima) out.minima[strip][g] = _mm512_setzero_ps();
        return _mm512_setzero_si512();
      }
      const __m512 scale = at(weight.scales(first_group + g));
      if constexpr (LAYOUT.has_minima) {
        out.minima[strip][g] = reorder(
            _mm512_fmadd_ps(scale, _mm512_set1_ps(8.0F), at(weight.minima(first_group + g))));
      }
      return _mm512_cvtps_epi32(_mm512_mul_ps(scale, steps[strip].inverse));
    };
    for (std::int64_t pair = 0; 2 * pair < groups; ++pair) {
      constexpr __mmask32 kHighHalves = 0xaaaaaaaa;
      const __m512i one = scale_of(2 * pair);
      const __m512i other = _mm512_slli_epi32(scale_of(2 * pair + 1), 16);
      out.scales[strip][pair] = reorder(_mm512_mask_blend_epi16(kHighHalves, one, other));
      const std::int64_t group = first_group + 2 * pair;
      const std::int64_t next = 2 * pair + 1 < groups ? group + 1 : group;
      unpack_pair(weight.codes(group, strip), weight.codes(next, strip), out.codes[strip][pair]);
    }
  }
}

template <q4nx::Layout LAYOUT>
constexpr std::int64_t kGroupBytes = LAYOUT.block_bytes() >> LAYOUT.group_bits;

// Some rows of a part in panels.
struct PanelRows {
  const std::int8_t* values;
  const std::int32_t* offsets;
  const float* scales;
  const float* sums;

  PanelRows(const Int8Panels& panels, std::int64_t part, std::int64_t row) {
    const std::int64_t at = part * panels.rows + row;
    values = panels.values + at * kPartColumns;
    offsets = panels.offsets + at * kGroupsPerPart;
    scales = panels.scales + at;
    sums = panels.sums + at * kGroupsPerPart;
  }
};

// 8 bytes in every 64-bit lane.
inline __m512i broadcast_pair(const void* x) {
  std::int64_t eight;
  std::memcpy(&eight, x, sizeof(eight));
  return _mm512_set1_epi64(eight);
}

// Where parts of a product are: the first one begins `out`, the last one puts it into order.
struct PartOrder {
  bool first;
  bool last;
};

// COUNT rows of activations times a strip of a part, added to out[COUNT][32]. With FETCH the bytes
// from `fetch` on are fetched meanwhile, as many as the part's pairs of groups have in a strip of
// each layout: not at once, which would be more than the core can ask for.
template <int COUNT, q4nx::Layout LAYOUT, bool FETCH>
void tile_panels(const PartWeights& w, int strip, std::int64_t pairs, const PanelRows& rows,
                 PartOrder order, const std::uint8_t* fetch, float* out) {
  __m512i total[COUNT];
  for (int r = 0; r < COUNT; ++r) total[r] = _mm512_setzero_si512();
  for (std::int64_t pair = 0; pair < pairs; ++pair) {
    if constexpr (FETCH) {
      for (std::int64_t line = 0; line < kGroupBytes<LAYOUT>; line += 64)
        _mm_prefetch(reinterpret_cast<const char*>(fetch + line), _MM_HINT_T0);
      fetch += kGroupBytes<LAYOUT>;
    }
    __m512i even[COUNT];
    __m512i odd[COUNT];
    for (int r = 0; r < COUNT; ++r)
      even[r] = odd[r] = broadcast_pair(rows.offsets + r * kGroupsPerPart + pair * 2);
    // Not unrolled, GCC 12 moves all dots from register to register: half the speed.
#pragma GCC unroll 8
    for (int quad = 0; quad < kQuads; ++quad) {
      const __m512i codes0 = _mm512_load_si512(w.codes[strip][pair][quad][0]);
      const __m512i codes1 = _mm512_load_si512(w.codes[strip][pair][quad][1]);
      for (int r = 0; r < COUNT; ++r) {
        const __m512i x =
            broadcast_pair(rows.values + r * kPartColumns + (pair * kQuads + quad) * 8);
        even[r] = _mm512_dpbusd_epi32(even[r], codes0, x);
        odd[r] = _mm512_dpbusd_epi32(odd[r], codes1, x);
      }
    }
    for (int r = 0; r < COUNT; ++r) {
      total[r] =
          _mm512_dpwssd_epi32(total[r], _mm512_packs_epi32(even[r], odd[r]), w.scales[strip][pair]);
    }
  }
  out += strip * q4nx::kStripRows;
  __m512 sum[COUNT];
  for (int r = 0; r < COUNT; ++r) {
    sum[r] = order.first ? _mm512_setzero_ps() : _mm512_loadu_ps(out + r * q4nx::kBlockRows);
    // The scales first: a sum of integers times that of large activations may be beyond f32.
    const __m512 scale = _mm512_mul_ps(_mm512_set1_ps(rows.scales[r]), w.steps[strip]);
    sum[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total[r]), scale, sum[r]);
  }
  if constexpr (LAYOUT.has_minima) {
    for (std::int64_t g = 0; g < 2 * pairs; ++g) {
      for (int r = 0; r < COUNT; ++r) {
        const __m512 group_sum = _mm512_set1_ps(rows.sums[r * kGroupsPerPart + g]);
        sum[r] = _mm512_fmadd_ps(w.minima[strip][g], group_sum, sum[r]);
      }
    }
  }
  for (int r = 0; r < COUNT; ++r)
    _mm512_storeu_ps(out + r * q4nx::kBlockRows, order.last ? reorder(sum[r]) : sum[r]);
}

// All rows of activations times a part that is unpacked. Tiles are nearly equal: one of a row or
// two would wait for its own dots.
template <q4nx::Layout LAYOUT>
void multiply_part(const PartWeights& w, std::int64_t part, std::int64_t pairs,
                   const Int8Panels& panels, std::int64_t first, std::int64_t count,
                   PartOrder order, const std::uint8_t* fetch, float* out) {
  const std::int64_t tiles = q4nx::ceil_div(count, kPanelTile);
  for (std::int64_t tile = 0; tile < tiles; ++tile) {
    const std::int64_t begin = count * tile / tiles;
    const std::int64_t end = count * (tile + 1) / tiles;
    const PanelRows rows(panels, part, first + begin);
    float* y = out + begin * q4nx::kBlockRows;
    with_count<kPanelTile>(end - begin, [&]<int COUNT>() {
      for (int strip = 0; strip < 2; ++strip) {
        if (tile == 0) {
          tile_panels<COUNT, LAYOUT, true>(w, strip, pairs, rows, order,
                                           fetch + strip * pairs * kGroupBytes<LAYOUT>, y);
        } else {
          tile_panels<COUNT, LAYOUT, false>(w, strip, pairs, rows, order, nullptr, y);
        }
      }
    });
  }
}

// Activations up to this many bytes are read again for each row of blocks, and weights in the order
// in which they lie, which is what few rows wait for; of more, a part of 256 columns at a time, for
// all rows of blocks. A quarter of an L2 of 1 MB.
constexpr std::int64_t kRereadBytes = 256 << 10;

template <q4nx::Layout LAYOUT>
void multiply_panels(const Q4NXRows& weight, std::int64_t row_blocks, const RoundedActivations& a,
                     std::int64_t first, std::int64_t count, std::byte* scratch, float* out) {
  auto& w = *reinterpret_cast<PartWeights*>(scratch);
  const std::int64_t parts = q4nx::ceil_div(a.filled_groups, kGroupsPerPart);
  const bool in_order = count * a.padded_k <= kRereadBytes;
  for (std::int64_t step = 0; step < parts * row_blocks; ++step) {
    const std::int64_t part = in_order ? step % parts : step / row_blocks;
    const std::int64_t block = in_order ? step / parts : step % row_blocks;
    const Q4NXRows row = weight.from(block);
    const std::int64_t first_group = part * kGroupsPerPart;
    const std::int64_t groups = std::min(kGroupsPerPart, a.filled_groups - first_group);
    unpack_with_steps<LAYOUT>(row, first_group, groups, w);
    // The bytes two parts further on, or the next row of blocks.
    const std::uint8_t* fetch =
        row.scales(first_group) +
        (in_order ? 2 * kGroupsPerPart * kGroupBytes<LAYOUT> : row.row_bytes);
    multiply_part<LAYOUT>(w, part, q4nx::ceil_div(groups, 2), a.panels, first, count,
                          {part == 0, part + 1 == parts}, fetch,
                          out + block * count * q4nx::kBlockRows);
  }
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
