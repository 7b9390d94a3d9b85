// SPDX-License-Identifier: Apache-2.0
// Activations rounded to panels of int8, for panels/multiply.h and amx/panels.h.
#pragma once

#include <immintrin.h>

#include "ops/cpu/kernels.h"
#include "ops/cpu/kernels/products/rounding.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// 32 columns to int8: [16 bytes][16 bytes].
inline void round_group(const Group& group, float inverse, __m128i (&bytes)[2]) {
  for (int v = 0; v < 2; ++v) {
    const Vector rounded = round_to_integer(group.part[v] * inverse);
    bytes[v] = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32((__m512)rounded));
  }
}

// The sums of the even and of the odd 32-bit lanes, side by side.
inline __m128i add_pairs(__m512i lanes) {
  const __m256i half =
      _mm256_add_epi32(_mm512_castsi512_si256(lanes), _mm512_extracti64x4_epi64(lanes, 1));
  const __m128i quarter =
      _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  return _mm_add_epi32(quarter, _mm_unpackhi_epi64(quarter, quarter));
}

// Rounds one row x[k], in whole parts. NaN or an infinity in a part makes the part's scale NaN or
// infinite, and all products with the part NaN.
inline void round_to_panels(const float* x, std::int64_t k, std::int64_t parts, std::int64_t row,
                            const Int8Panels& panels) {
  for (std::int64_t part = 0; part < parts; ++part) {
    const std::int64_t at = part * panels.rows + row;
    const Int8Scale scale = int8_scale(x, part * kPartColumns, kPartColumns, k);
    panels.scales[at] = scale.scale;
    std::int8_t* values = panels.values + at * kPartColumns;
    for (std::int64_t g = 0; g < kGroupsPerPart; g += 2) {
      const std::int64_t start = part * kPartColumns + g * q4nx::kGroup;
      __m128i one[2];
      __m128i other[2];
      round_group(load_group(x, start, k), scale.inverse, one);
      round_group(load_group(x, start + q4nx::kGroup, k), scale.inverse, other);
      const auto in_turn = [](__m128i a, __m128i b) {
        return _mm256_set_m128i(_mm_unpackhi_epi32(a, b), _mm_unpacklo_epi32(a, b));
      };
      const __m512i pair = _mm512_inserti64x4(_mm512_castsi256_si512(in_turn(one[0], other[0])),
                                              in_turn(one[1], other[1]), 1);
      _mm512_storeu_si512(values + g * q4nx::kGroup, pair);
      const __m128i sums =
          add_pairs(_mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), pair));
      const __m128 floats = _mm_mul_ps(_mm_cvtepi32_ps(sums), _mm_set1_ps(scale.scale));
      _mm_storel_pi(reinterpret_cast<__m64*>(panels.sums + at * kGroupsPerPart + g), floats);
      const __m128i offsets = _mm_slli_epi32(_mm_sub_epi32(_mm_setzero_si128(), sums), 3);
      _mm_storel_epi64(reinterpret_cast<__m128i*>(panels.offsets + at * kGroupsPerPart + g),
                       offsets);
    }
  }
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
