// SPDX-License-Identifier: Apache-2.0
// Q4NX weights of 8 bits in AVX2 + FMA. Codes are read as they are stored, {even rows, odd rows} of
// a strip in the lanes of q4nx_avx2.h, so that nothing is unpacked for int8 activations.
#pragma once

#include "ops/cpu/kernels/products/fused_dqp.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// Codes of four columns of a strip.
inline ByteCodes stored_codes(const Q4NXRows& weight, std::int64_t group, int strip, int quad) {
  const std::uint8_t* codes =
      weight.codes(group, 0) + quad * q4nx::kByteQuadBytes + strip * kStripRows * 2;
  return {load_bytes(codes), load_bytes(codes + q4nx::kByteQuadBytes / 2)};
}

// Codes of one of four columns in f32.
template <int COLUMN>
Rows float_codes(ByteCodes four) {
  const auto widen = [](__m256i bytes) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(bytes, 24 - 8 * COLUMN), 24));
  };
  return {widen(four.even), widen(four.odd)};
}

// Dots of signed codes with signed activations, in 32 bits. vpmaddubsw multiplies unsigned bytes by
// signed ones: so magnitudes of codes by activations with the codes' signs. Its sum of two products
// of at most 128 x 127 is 32512, below 32767.
inline void dot_signed(__m256i& dot, __m256i codes, __m256i magnitudes, __m256i x) {
  const __m256i pairs = _mm256_maddubs_epi16(magnitudes, _mm256_sign_epi8(x, codes));
  dot = _mm256_add_epi32(dot, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

template <int COUNT, q4nx::Layout LAYOUT>
void multiply_bytes_int8(Q4NXRows weight, const RoundedActivations& a, std::int64_t first,
                         float* out) {
  weight.layout = LAYOUT;
  const auto* x = static_cast<const std::int8_t*>(a.values) + first * a.padded_k;
  const float* scales = a.scales + first * a.groups;
  const float* sums = a.sums + first * a.groups;
  Rows total[kStrips][COUNT];
  for (std::int64_t group = 0; group < weight.stored_groups;
       ++group, x += kGroup, ++scales, ++sums) {
    fetch_ahead<LAYOUT>(weight, group).rest();
    for (int strip = 0; strip < kStrips; ++strip) {
      IntegerRows dot[COUNT];
#pragma GCC unroll 2
      for (int quad = 0; quad < kGroup / 4; ++quad) {
        const ByteCodes codes = stored_codes(weight, group, strip, quad);
        const __m256i even = _mm256_abs_epi8(codes.even);
        const __m256i odd = _mm256_abs_epi8(codes.odd);
        for (int r = 0; r < COUNT; ++r) {
          std::int32_t four;
          std::memcpy(&four, x + r * a.padded_k + quad * 4, sizeof(four));
          dot_signed(dot[r].even, codes.even, even, _mm256_set1_epi32(four));
          dot_signed(dot[r].odd, codes.odd, odd, _mm256_set1_epi32(four));
        }
      }
      const auto [scale, minimum] = load_parameters(weight, group, strip);
      for (int r = 0; r < COUNT; ++r) {
        const std::int64_t at = r * a.groups;
        const __m256 s = _mm256_set1_ps(scales[at]);
        add_group(total[strip][r],
                  Rows{_mm256_mul_ps(_mm256_cvtepi32_ps(dot[r].even), s),
                       _mm256_mul_ps(_mm256_cvtepi32_ps(dot[r].odd), s)},
                  scale, minimum, sums[at]);
      }
    }
  }
  store_strips(total, out);
}

template <int COUNT, q4nx::Layout LAYOUT>
void multiply_bytes_bf16(Q4NXRows weight, const RoundedActivations& a, std::int64_t first,
                         float* out) {
  weight.layout = LAYOUT;
  const float* sums = a.sums + first * a.groups;
  Rows total[kStrips][COUNT];
  for (std::int64_t group = 0; group < weight.stored_groups; ++group, ++sums) {
    fetch_ahead<LAYOUT>(weight, group).rest();
    alignas(32) float x[COUNT * kGroup];
    widen(a, first, COUNT, group * kGroup, kGroup, x);
    for (int strip = 0; strip < kStrips; ++strip) {
      Rows dot[COUNT];
      for (int quad = 0; quad < kGroup / 4; ++quad) {
        const ByteCodes codes = stored_codes(weight, group, strip, quad);
        const auto multiply = [&]<int COLUMN>() {
          const Rows column = float_codes<COLUMN>(codes);
          for (int r = 0; r < COUNT; ++r)
            dot_float(dot[r], column, x + r * kGroup + quad * 4 + COLUMN);
        };
        multiply.template operator()<0>();
        multiply.template operator()<1>();
        multiply.template operator()<2>();
        multiply.template operator()<3>();
      }
      const auto [scale, minimum] = load_parameters(weight, group, strip);
      for (int r = 0; r < COUNT; ++r) {
        add_group(total[strip][r], dot[r], scale, minimum, sums[r * a.groups]);
      }
    }
  }
  store_strips(total, out);
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
