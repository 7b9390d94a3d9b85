// SPDX-License-Identifier: Apache-2.0
// FusedDQP and Q4NXMatMul in AVX2 + FMA: few rows of activations at a time meet the codes in
// registers.
//
// Layout: lane i of a register holds the row pair i of a strip's 8: low nibble row 2i, high nibble
// row 2i+1. So a strip of 16 rows is a pair {even rows, odd rows} of 8 lanes, and scales and
// minima, bf16 [row], split the same way. bf16 activations are multiplied in f32 (AVX2 has no bf16
// products), int8 ones by vpmaddubsw: codes up to 15 times activations up to 127, two of them
// summed, is 3810, far from the 32767 at which that instruction saturates.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "ops/cpu/kernels.h"
#include "ops/cpu/kernels/vector.h"
#include "ops/q4nx.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

struct Rows {
  __m256 even = _mm256_setzero_ps();
  __m256 odd = _mm256_setzero_ps();
};

// Rows of activations in registers: 4 x 2 dots and 4 x 2 totals would fill all 16, so the compiler
// keeps the totals of the int8 path in L1; 4 is still faster than 2, because each unpacked register
// is used four times.
constexpr int kTile = 4;

inline Rows load_group_rows(const std::uint8_t* bf16) {
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bf16));
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000U));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)),
          _mm256_castsi256_ps(_mm256_and_si256(pairs, high))};
}

inline void store_rows(Rows rows, float* out) {
  const __m256 low = _mm256_unpacklo_ps(rows.even, rows.odd);
  const __m256 high = _mm256_unpackhi_ps(rows.even, rows.odd);
  _mm256_storeu_ps(out, _mm256_permute2f128_ps(low, high, 0x20));
  _mm256_storeu_ps(out + 8, _mm256_permute2f128_ps(low, high, 0x31));
}

inline void add_group(Rows& total, Rows dot, Rows scale, Rows minimum, float sum) {
  const __m256 s = _mm256_set1_ps(sum);
  total.even = _mm256_fmadd_ps(minimum.even, s, _mm256_fmadd_ps(dot.even, scale.even, total.even));
  total.odd = _mm256_fmadd_ps(minimum.odd, s, _mm256_fmadd_ps(dot.odd, scale.odd, total.odd));
}

// One strip (16 rows) of one group of 32 columns.
struct StripGroup {
  const std::uint8_t* codes;
  Rows scale;
  Rows minimum;
};

inline StripGroup strip_group(const std::uint8_t* blocks, std::int64_t strip, std::int64_t group) {
  const std::int64_t within = group % q4nx::kGroupsPerBlock;
  const std::uint8_t* block = blocks + group / q4nx::kGroupsPerBlock * q4nx::kBlockBytes;
  const std::uint8_t* parameters = block + within * 64 + strip * 32;
  return {block + q4nx::kCodeOffset + strip * q4nx::kStripBytes +
              within * q4nx::kGroup * q4nx::kColumnBytes,
          load_group_rows(parameters), load_group_rows(parameters + q4nx::kMinimumOffset)};
}

template <int COUNT>
void strip_bf16(const std::uint8_t* blocks, std::int64_t strip, const RoundedActivations& a,
                std::int64_t first, float* out) {
  const auto* x = static_cast<const std::uint16_t*>(a.values) + first * a.padded_k;
  const __m256i nibble = _mm256_set1_epi32(0x0f);
  Rows total[COUNT];
  for (std::int64_t group = 0; group < a.groups; ++group) {
    const StripGroup at = strip_group(blocks, strip, group);
    Rows dot[COUNT];
    for (int column = 0; column < q4nx::kGroup; ++column) {
      const __m128i packed =
          _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at.codes + column * q4nx::kColumnBytes));
      const __m256i bytes = _mm256_cvtepu8_epi32(packed);
      const __m256 even = _mm256_cvtepi32_ps(_mm256_and_si256(bytes, nibble));
      const __m256 odd = _mm256_cvtepi32_ps(_mm256_srli_epi32(bytes, 4));
      for (int r = 0; r < COUNT; ++r) {
        const __m256 xr =
            _mm256_set1_ps(float_from_bf16(x[r * a.padded_k + group * q4nx::kGroup + column]));
        dot[r].even = _mm256_fmadd_ps(even, xr, dot[r].even);
        dot[r].odd = _mm256_fmadd_ps(odd, xr, dot[r].odd);
      }
    }
    for (int r = 0; r < COUNT; ++r) {
      add_group(total[r], dot[r], at.scale, at.minimum, a.sums[(first + r) * a.groups + group]);
    }
  }
  for (int r = 0; r < COUNT; ++r) store_rows(total[r], out + r * q4nx::kBlockRows + strip * 16);
}

template <int COUNT>
void strip_int8(const std::uint8_t* blocks, std::int64_t strip, const RoundedActivations& a,
                std::int64_t first, float* out) {
  const auto* x = static_cast<const std::int8_t*>(a.values) + first * a.padded_k;
  // 4 columns of 8 bytes -> lanes of (row pair i) x 4 columns: first the two halves of each column
  // are parted, so that each 128-bit half holds 4 row pairs of all 4 columns, then each half is
  // transposed.
  const __m256i halves = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
  const __m256i transpose = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  const __m256i nibble = _mm256_set1_epi8(0x0f);
  const __m256i ones = _mm256_set1_epi16(1);
  Rows total[COUNT];
  for (std::int64_t group = 0; group < a.groups; ++group) {
    const StripGroup at = strip_group(blocks, strip, group);
    __m256i dot_even[COUNT];
    __m256i dot_odd[COUNT];
    for (int r = 0; r < COUNT; ++r) dot_even[r] = dot_odd[r] = _mm256_setzero_si256();
    for (int quad = 0; quad < q4nx::kGroup / 4; ++quad) {
      const __m256i packed = _mm256_loadu_si256(
          reinterpret_cast<const __m256i*>(at.codes + quad * 4 * q4nx::kColumnBytes));
      const __m256i bytes =
          _mm256_shuffle_epi8(_mm256_permutevar8x32_epi32(packed, halves), transpose);
      const __m256i even = _mm256_and_si256(bytes, nibble);
      const __m256i odd = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble);
      for (int r = 0; r < COUNT; ++r) {
        std::int32_t four;
        std::memcpy(&four, x + r * a.padded_k + group * q4nx::kGroup + quad * 4, sizeof(four));
        const __m256i xr = _mm256_set1_epi32(four);
        dot_even[r] =
            _mm256_add_epi32(dot_even[r], _mm256_madd_epi16(_mm256_maddubs_epi16(even, xr), ones));
        dot_odd[r] =
            _mm256_add_epi32(dot_odd[r], _mm256_madd_epi16(_mm256_maddubs_epi16(odd, xr), ones));
      }
    }
    for (int r = 0; r < COUNT; ++r) {
      const std::int64_t entry = (first + r) * a.groups + group;
      const __m256 scale = _mm256_set1_ps(a.scales[entry]);
      const Rows dot{_mm256_mul_ps(_mm256_cvtepi32_ps(dot_even[r]), scale),
                     _mm256_mul_ps(_mm256_cvtepi32_ps(dot_odd[r]), scale)};
      add_group(total[r], dot, at.scale, at.minimum, a.sums[entry]);
    }
  }
  for (int r = 0; r < COUNT; ++r) store_rows(total[r], out + r * q4nx::kBlockRows + strip * 16);
}

inline void matmul_bf16(const std::uint8_t* blocks, std::int64_t /*k*/, const RoundedActivations& a,
                        std::int64_t first, std::int64_t count, std::byte* /*scratch*/,
                        float* out) {
  for (std::int64_t strip = 0; strip < 2; ++strip) {
    std::int64_t row = 0;
    for (; row + kTile <= count; row += kTile) {
      strip_bf16<kTile>(blocks, strip, a, first + row, out + row * q4nx::kBlockRows);
    }
    for (; row < count; ++row)
      strip_bf16<1>(blocks, strip, a, first + row, out + row * q4nx::kBlockRows);
  }
}

inline void matmul_int8(const std::uint8_t* blocks, std::int64_t /*k*/, const RoundedActivations& a,
                        std::int64_t first, std::int64_t count, std::byte* /*scratch*/,
                        float* out) {
  for (std::int64_t strip = 0; strip < 2; ++strip) {
    std::int64_t row = 0;
    for (; row + kTile <= count; row += kTile) {
      strip_int8<kTile>(blocks, strip, a, first + row, out + row * q4nx::kBlockRows);
    }
    for (; row < count; ++row)
      strip_int8<1>(blocks, strip, a, first + row, out + row * q4nx::kBlockRows);
  }
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
