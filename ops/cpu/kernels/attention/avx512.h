// SPDX-License-Identifier: Apache-2.0
// The Arithmetic of flow_qkv_attention.h with AVX-512 for caches of bf16 or int8: dot products of
// pairs of bf16, which are two elements of a head in Q K^T, and two keys in F V.
//
// Queries (after scaling) and F are rounded to bf16, as on the papers' NPU. Sums, the maximum, exp
// and the denominator are f32; the denominator is the sum of the rounded F. An int8 cache's
// elements, scale
// * code, are rounded to bf16 as well.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "ops/cpu/kernels.h"
#include "ops/cpu/kernels/attention/cache_row.h"
#include "ops/cpu/kernels/int8_row.h"
#include "ops/cpu/kernels/vector.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// Whether a cache is multiplied as pairs of bf16: a head of odd size does not fall into pairs.
inline bool takes_pairs(std::int64_t head_size, DataType cache_type) {
  return (cache_type == DataType::kBFloat16 || cache_type == DataType::kInt8) && head_size % 2 == 0;
}

struct BFloat16Pairs {
  // Two bf16; the low half comes first.
  using Element = std::uint32_t;
  using Packed = __m512i;
  static constexpr int kStep = 2;
  // 4 x 4 accumulators, 4 vectors of queries and an element leave 11 of 32 registers. A dot takes
  // some 5 cycles and 2 begin in each cycle, so 10 accumulators would suffice. The 8 loads for 16
  // dots use half of the two load ports.
  static constexpr int kVectors = 4;
  static constexpr int tile(int vectors) { return vectors == 3 ? 8 : 16 / vectors; }
  // An int8 cache's rows become bf16 once a chunk, for all blocks of queries.
  static bool converts_keys(DataType cache_type) { return cache_type == DataType::kInt8; }
  // Scores are binary logarithms: queries are multiplied by log2 e before they are rounded, so that
  // exp needs no multiplication.
  static constexpr float kScoreUnit = 1.44269504F;

  // 2^x for x <= 0: 2^floor(x), which scalef multiplies by, times 2^r, 0 <= r <= 1, by the
  // polynomial of degree 4 whose relative error there is least, 2.7e-6: far below bf16's half ulp
  // (2^-9). For minus infinity r is 0, and scalef makes the result 0; NaN is passed on.
  static Vector exponential(Vector x) {
    const __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 y = _mm512_set1_ps(1.35341678e-2F);
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(5.20114601e-2F));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(2.41442755e-1F));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(6.93003833e-1F));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.00000262F));
    return _mm512_scalef_ps(y, x);
  }

  // 32 elements as pairs, in units of scores; if fewer are left, n, the others are zeros.
  static Vector round(const float* x, std::int64_t n) {
    alignas(64) float padded[2 * kLanes] = {};
    if (n < 2 * kLanes) {
      std::memcpy(padded, x, static_cast<std::size_t>(n) * sizeof(float));
      x = padded;
    }
    const __m512 unit = _mm512_set1_ps(kScoreUnit);
    const __m512bh pairs = _mm512_cvtne2ps_pbh(_mm512_mul_ps(_mm512_loadu_ps(x + kLanes), unit),
                                               _mm512_mul_ps(_mm512_loadu_ps(x), unit));
    return _mm512_castsi512_ps((__m512i)pairs);
  }

  static __m512i load_packed(const std::uint32_t* x) { return _mm512_load_si512(x); }
  static __m512i broadcast_element(const void* x) {
    std::int32_t pair;
    std::memcpy(&pair, x, sizeof(pair));
    return _mm512_set1_epi32(pair);
  }
  static __m512i ones() { return _mm512_set1_epi32(0x3f803f80); }
  static void dot(Vector& sum, __m512i a, __m512i b) {
    sum = _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  }
  static __m512i pack(const Vector (&factors)[kStep]) {
    const __m512i interleave =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(interleave,
                                    (__m512i)_mm512_cvtne2ps_pbh(factors[1], factors[0]));
  }

  static __m512i widen(const std::uint16_t* x) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
  }
  // kLanes elements of a row of an int8 cache, as bf16.
  static __m256i round_codes(const std::int8_t* x, float scale) {
    return (__m256i)_mm512_cvtneps_pbh(Int8::load_vector(x) * broadcast(scale));
  }
  static std::uint16_t round_code(const std::int8_t* x, float scale) {
    return bf16_from_float(Int8::load_one(x) * scale);
  }

  static void convert_key(const AttentionSweep& sweep, std::int64_t key, std::uint32_t* out) {
    const std::byte* row = cache_row(sweep, sweep.key, key);
    const auto* codes = reinterpret_cast<const std::int8_t*>(row);
    const float scale = int8_row_scale(row, sweep.head_size);
    auto* elements = reinterpret_cast<std::byte*>(out);
    std::int64_t i = 0;
    for (; i + kLanes <= sweep.head_size; i += kLanes) {
      const __m256i rounded = round_codes(codes + i, scale);
      std::memcpy(elements + i * 2, &rounded, sizeof(rounded));
    }
    for (; i < sweep.head_size; ++i) {
      const std::uint16_t rounded = round_code(codes + i, scale);
      std::memcpy(elements + i * 2, &rounded, sizeof(rounded));
    }
  }

  // out[i]: element i of V's rows `key` and `key` + 1, as a pair. If the second row is past `end`,
  // the first row takes its place: its factor is 0.
  static void order_values(const AttentionSweep& sweep, std::int64_t key, std::int64_t end,
                           std::uint32_t* out) {
    const std::byte* low = cache_row(sweep, sweep.value, key);
    const std::byte* high = key + 1 < end ? cache_row(sweep, sweep.value, key + 1) : low;
    if (sweep.cache_type == DataType::kInt8) return pair_codes(low, high, sweep.head_size, out);
    pair_elements(low, high, sweep.head_size, out);
  }

 private:
  static void pair_elements(const void* first, const void* second, std::int64_t d,
                            std::uint32_t* out) {
    const auto* low = static_cast<const std::uint16_t*>(first);
    const auto* high = static_cast<const std::uint16_t*>(second);
    std::int64_t i = 0;
    for (; i + kLanes <= d; i += kLanes) {
      const __m512i other = _mm512_slli_epi32(widen(high + i), 16);
      _mm512_storeu_si512(out + i, _mm512_or_si512(widen(low + i), other));
    }
    for (; i < d; ++i) out[i] = low[i] | (std::uint32_t{high[i]} << 16);
  }
  static void pair_codes(const void* first, const void* second, std::int64_t d,
                         std::uint32_t* out) {
    const auto* low = static_cast<const std::int8_t*>(first);
    const auto* high = static_cast<const std::int8_t*>(second);
    const float low_scale = int8_row_scale(first, d);
    const float high_scale = int8_row_scale(second, d);
    std::int64_t i = 0;
    for (; i + kLanes <= d; i += kLanes) {
      const __m512i one = _mm512_cvtepu16_epi32(round_codes(low + i, low_scale));
      const __m512i other = _mm512_cvtepu16_epi32(round_codes(high + i, high_scale));
      _mm512_storeu_si512(out + i, _mm512_or_si512(one, _mm512_slli_epi32(other, 16)));
    }
    for (; i < d; ++i)
      out[i] =
          round_code(low + i, low_scale) | (std::uint32_t{round_code(high + i, high_scale)} << 16);
  }
};

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
