// SPDX-License-Identifier: Apache-2.0
// A part of a Q4NX weight, 32 rows x 256 columns, in the form that multiplies rows in panels: 4-bit
// codes in bytes, and the scales of its groups as integers.
#pragma once

#include <immintrin.h>

#include "ops/cpu/kernels.h"
#include "ops/cpu/kernels/products/q4nx_avx512.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

constexpr int kPartPairs = static_cast<int>(kGroupsPerPart) / 2;
constexpr int kQuads = static_cast<int>(q4nx::kGroup) / 4;

// Two groups' codes of a strip in four columns: lane 2 i has those of the one group and lane 2 i +
// 1 those of the other, `even` for row 2 i of the strip and `odd` for row 2 i + 1.
struct PairCodes {
  __m512i even;
  __m512i odd;
};

// 32 rows of the weight x 256 columns. Packing reorders the dots of 16 rows to 0, 2, 1, 3 of each
// four; every [16] here has this order.
struct alignas(64) PartWeights {
  // PairCodes of each strip. Neither these nor the scales are filled for a single tile of
  // activations.
  std::byte codes[2][kPartPairs][kQuads][2][64];
  // 16 bits for each of two groups, [16].
  __m512i scales[2][kPartPairs];
  // f32 [16]: the steps; and their inverses, which are in the order of the rows.
  __m512 steps[2];
  __m512 inverses[2];
  __m512 minima[2][kGroupsPerPart];

  PairCodes load(int strip, std::int64_t pair, int quad) const {
    return {_mm512_load_si512(codes[strip][pair][quad][0]),
            _mm512_load_si512(codes[strip][pair][quad][1])};
  }
  void keep(int strip, std::int64_t pair, int quad, const PairCodes& unpacked) {
    _mm512_store_si512(codes[strip][pair][quad][0], unpacked.even);
    _mm512_store_si512(codes[strip][pair][quad][1], unpacked.odd);
  }
};
static_assert(sizeof(PartWeights) <= kMatMulScratchBytes);

// To the order 0, 2, 1, 3 of each four rows, and back.
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

// The step for the largest magnitudes of scales, which are given as bits of f32. An infinite or NaN
// scale is its own step, so that products with it are not finite.
inline Step16 step_of(__m512i largest) {
  constexpr int kExponent = 23;
  // The least power: smaller ones would have inverses beyond f32. 2^-100 is less than any weight
  // that matters.
  const __m512i least = _mm512_set1_epi32((127 - 100) << kExponent);
  const __m512i infinity = _mm512_set1_epi32(0xff << kExponent);
  const __m512i power = _mm512_and_si512(_mm512_max_epi32(largest, least), infinity);
  const __m512i step = _mm512_sub_epi32(power, _mm512_set1_epi32(12 << kExponent));
  const __m512i inverse = _mm512_sub_epi32(_mm512_set1_epi32(2 * 127 << kExponent), step);
  const __mmask16 no_number = _mm512_cmpeq_epi32_mask(power, infinity);
  return {_mm512_castsi512_ps(_mm512_mask_mov_epi32(step, no_number, largest)),
          _mm512_castsi512_ps(inverse)};
}

// The steps of both strips for `groups` groups from `first_group` on.
inline void find_steps(const Q4NXRows& weight, std::int64_t first_group, std::int64_t groups,
                       Step16 (&steps)[2]) {
  // bf16 values without their signs compare like integers, and NaN is the largest.
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

// vpermb indices: 4 columns of 8 row pairs of one group, then of another -> lane 2 i: row pair i of
// the one group, lane 2 i + 1: row pair i of the other.
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

// Two groups of a strip as they are stored.
struct PackedPair {
  const std::uint8_t* one;
  const std::uint8_t* other;

  // The codes of columns 4 quad .. 4 quad + 3 of both.
  PairCodes unpack(int quad) const {
    constexpr int kQuadBytes = 4 * static_cast<int>(q4nx::kColumnBytes);
    const __m512i index = load_index(kPairIndex);
    const __m512i nibble = _mm512_set1_epi8(0x0f);
    const auto load = [](const std::uint8_t* four) {
      return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(four));
    };
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(load(one + quad * kQuadBytes)),
                                            load(other + quad * kQuadBytes), 1);
    const __m512i bytes = _mm512_permutexvar_epi8(index, both);
    return {_mm512_and_si512(bytes, nibble), _mm512_and_si512(_mm512_srli_epi16(bytes, 4), nibble)};
  }
};

// The groups of a part, in the first row of blocks of `weight`.
struct PartGroups {
  Q4NXRows weight;
  std::int64_t first;
  std::int64_t count;

  std::int64_t pairs() const { return q4nx::ceil_div(count, 2); }

  // Where there is an odd number of groups, the last one is paired with itself.
  template <q4nx::Layout LAYOUT>
  PackedPair packed(std::int64_t pair, int strip) const {
    Q4NXRows rows = weight;
    rows.layout = LAYOUT;
    const std::int64_t group = first + 2 * pair;
    return {rows.codes(group, strip), rows.codes(2 * pair + 1 < count ? group + 1 : group, strip)};
  }
};

// Computes the steps of both strips, and the remainders of the groups' minima for codes less 8.
template <q4nx::Layout LAYOUT>
inline void begin_part(const PartGroups& groups, PartWeights& out) {
  Q4NXRows weight = groups.weight;
  weight.layout = LAYOUT;
  Step16 steps[2];
  find_steps(weight, groups.first, groups.count, steps);
  for (int strip = 0; strip < 2; ++strip) {
    out.steps[strip] = reorder(steps[strip].step);
    out.inverses[strip] = steps[strip].inverse;
  }
  if constexpr (LAYOUT.has_minima) {
    for (int strip = 0; strip < 2; ++strip) {
      const auto at = [&](const std::uint8_t* bf16) {
        return load_strip_rows(bf16 + strip * q4nx::kStripRows * 2);
      };
      for (std::int64_t g = groups.first; g < groups.first + groups.count; ++g) {
        out.minima[strip][g - groups.first] = reorder(
            _mm512_fmadd_ps(at(weight.scales(g)), _mm512_set1_ps(8.0F), at(weight.minima(g))));
      }
      // K may end with an odd group. The missing group then has a remainder of 0.
      if (groups.count % 2 != 0) out.minima[strip][groups.count] = _mm512_setzero_ps();
    }
  }
}

// The scales of a pair of groups in steps, 16 bits each; 0 for a group that is not there.
template <q4nx::Layout LAYOUT>
inline __m512i pair_scales(const PartGroups& groups, const PartWeights& w, std::int64_t pair,
                           int strip) {
  Q4NXRows weight = groups.weight;
  weight.layout = LAYOUT;
  const auto scale_of = [&](std::int64_t g) {
    const std::uint8_t* bf16 = weight.scales(groups.first + g) + strip * q4nx::kStripRows * 2;
    return _mm512_cvtps_epi32(_mm512_mul_ps(load_strip_rows(bf16), w.inverses[strip]));
  };
  constexpr __mmask32 kHighHalves = 0xaaaaaaaa;
  const __m512i one = scale_of(2 * pair);
  const __m512i other =
      2 * pair + 1 < groups.count ? scale_of(2 * pair + 1) : _mm512_setzero_si512();
  return reorder(_mm512_mask_blend_epi16(kHighHalves, one, _mm512_slli_epi32(other, 16)));
}

// Fills in everything but the codes.
template <q4nx::Layout LAYOUT>
void prepare_part(const PartGroups& groups, PartWeights& out) {
  begin_part<LAYOUT>(groups, out);
  for (int strip = 0; strip < 2; ++strip) {
    for (std::int64_t pair = 0; pair < groups.pairs(); ++pair)
      out.scales[strip][pair] = pair_scales<LAYOUT>(groups, out, pair, strip);
  }
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
