// SPDX-License-Identifier: Apache-2.0
// Q4NX in AVX2 registers: what FusedDQP and Q4NXMatMul share.
//
// Layout: 8 bytes of a column are the 8 row pairs of a strip: low nibble row 2i, high nibble row
// 2i+1. Lane i of a register holds the row pair i, so that a strip of 16 rows is a pair {even rows,
// odd rows} of 8 lanes, and scales and minima, bf16 [row], split the same way; 8-bit codes are
// stored so. int8 activations: a lane has four columns, a byte each. bf16: a lane has one column in
// f32 (AVX2 has no bf16 products).
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "ops/cpu/kernels.h"
#include "ops/cpu/kernels/vector.h"
#include "ops/cpu/kernels/with_count.h"
#include "ops/cpu/q4nx_rows.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

constexpr int kStrips = 2;
constexpr int kStripRows = 16;
constexpr std::int64_t kGroup = q4nx::kGroup;

// 16 rows in f32: rows 0, 2, .., 14 and rows 1, 3, .., 15 of a strip.
struct Rows {
  __m256 even = _mm256_setzero_ps();
  __m256 odd = _mm256_setzero_ps();
};

inline __m256i load_bytes(const void* bytes) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(bytes));
}

inline Rows load_group_rows(const std::uint8_t* bf16) {
  const __m256i pairs = load_bytes(bf16);
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

inline Rows load_rows(const float* in) {
  const __m256 first = _mm256_loadu_ps(in);
  const __m256 second = _mm256_loadu_ps(in + 8);
  const __m256 low = _mm256_permute2f128_ps(first, second, 0x20);
  const __m256 high = _mm256_permute2f128_ps(first, second, 0x31);
  return {_mm256_shuffle_ps(low, high, 0x88), _mm256_shuffle_ps(low, high, 0xdd)};
}

// Scales and minima of a strip's rows in a group of 32 columns.
struct Parameters {
  Rows scale;
  Rows minimum;
};

[[gnu::always_inline]] inline Parameters load_parameters(const Q4NXRows& weight, std::int64_t group,
                                                         int strip) {
  const std::int64_t offset = strip * q4nx::kStripRows * 2;
  const Rows scale = load_group_rows(weight.scales(group) + offset);
  if (weight.layout.has_minima) return {scale, load_group_rows(weight.minima(group) + offset)};
  const __m256 factor = _mm256_set1_ps(weight.layout.minimum_of_symmetric());
  return {scale, {_mm256_mul_ps(scale.even, factor), _mm256_mul_ps(scale.odd, factor)}};
}

// total += dot * scale + minimum * (sum of activations): eq. 3 taken out of the sum over a group.
inline void add_group(Rows& total, Rows dot, Rows scale, Rows minimum, float sum) {
  const __m256 s = _mm256_set1_ps(sum);
  total.even = _mm256_fmadd_ps(minimum.even, s, _mm256_fmadd_ps(dot.even, scale.even, total.even));
  total.odd = _mm256_fmadd_ps(minimum.odd, s, _mm256_fmadd_ps(dot.odd, scale.odd, total.odd));
}

// Codes of four columns as bytes.
struct ByteCodes {
  __m256i even;
  __m256i odd;
};

// 4 columns of 8 bytes -> lane i: row pair i of 4 columns. First the two halves of each column are
// separated, so that each 128-bit half holds 4 row pairs of all 4 columns. Then each half is
// transposed.
inline ByteCodes byte_codes(const std::uint8_t* codes) {
  const __m256i halves = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
  const __m256i transpose = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  const __m256i nibble = _mm256_set1_epi8(0x0f);
  const __m256i parted = _mm256_permutevar8x32_epi32(load_bytes(codes), halves);
  const __m256i bytes = _mm256_shuffle_epi8(parted, transpose);
  return {_mm256_and_si256(bytes, nibble), _mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble)};
}

// Values of four columns of a strip.
template <q4nx::Layout LAYOUT>
inline ByteCodes byte_codes(const Q4NXRows& weight, std::int64_t group, int strip, int quad) {
  if constexpr (LAYOUT.code_bits == 8) {
    const std::uint8_t* codes =
        weight.codes(group, 0) + quad * q4nx::kByteQuadBytes + strip * kStripRows * 2;
    return {load_bytes(codes), load_bytes(codes + q4nx::kByteQuadBytes / 2)};
  }
  const ByteCodes codes = byte_codes(weight.codes(group, strip) + quad * 4 * q4nx::kColumnBytes);
  if constexpr (!LAYOUT.has_table) return codes;
  const __m256i table = _mm256_broadcastsi128_si256(
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(weight.table(group))));
  return {_mm256_shuffle_epi8(table, codes.even), _mm256_shuffle_epi8(table, codes.odd)};
}

inline void store_codes(ByteCodes codes, std::byte* unpacked) {
  _mm256_store_si256(reinterpret_cast<__m256i*>(unpacked), codes.even);
  _mm256_store_si256(reinterpret_cast<__m256i*>(unpacked + 32), codes.odd);
}

inline ByteCodes load_codes(const std::byte* unpacked) {
  return {load_bytes(unpacked), load_bytes(unpacked + 32)};
}

// The dots of a strip's unsigned codes with signed activations, in 16 bits, two for each row
// (columns 0, 1 and 2, 3 of four). Over a group each is a sum of 8 times two products of at most 15
// x 127: 30480, below 32767, the limit of vpmaddubsw and of 16-bit sums. So they are widened to 32
// bits only once a group.
struct IntegerRows {
  __m256i even = _mm256_setzero_si256();
  __m256i odd = _mm256_setzero_si256();
};
static_assert(kGroup / 4 * 2 * 15 * 127 <= 32767);

inline void dot_int8(IntegerRows& dot, ByteCodes codes, const std::int8_t* x) {
  std::int32_t four;
  std::memcpy(&four, x, sizeof(four));
  const __m256i columns = _mm256_set1_epi32(four);
  dot.even = _mm256_add_epi16(dot.even, _mm256_maddubs_epi16(codes.even, columns));
  dot.odd = _mm256_add_epi16(dot.odd, _mm256_maddubs_epi16(codes.odd, columns));
}

// Pairs of 16-bit integers, added in 32 bits.
inline __m256i pairs_added(__m256i dot) { return _mm256_madd_epi16(dot, _mm256_set1_epi16(1)); }

// The dots of signed values with signed activations, in 32 bits. vpmaddubsw multiplies unsigned
// bytes by signed ones: so magnitudes of values by activations with the values' signs. Its sum of
// two products of at most 128 x 127 is 32512, below 32767, to which no other may be added.
struct SignedRows {
  __m256i even = _mm256_setzero_si256();
  __m256i odd = _mm256_setzero_si256();
};

inline void dot_int8(SignedRows& dot, ByteCodes codes, const std::int8_t* x) {
  std::int32_t four;
  std::memcpy(&four, x, sizeof(four));
  const __m256i columns = _mm256_set1_epi32(four);
  const auto dots = [&](__m256i values) {
    return pairs_added(
        _mm256_maddubs_epi16(_mm256_abs_epi8(values), _mm256_sign_epi8(columns, values)));
  };
  dot.even = _mm256_add_epi32(dot.even, dots(codes.even));
  dot.odd = _mm256_add_epi32(dot.odd, dots(codes.odd));
}

// The dots of values from -15 to 15, as MXFP4 has them, in 16 bits: IntegerRows' limits hold for
// their magnitudes. The activations' magnitudes are the unsigned factor, since one serves all rows.
// A core of a Zen 3 multiplies a row by cached values at 16 GB/s with them, at 10 without.
struct NarrowRows : IntegerRows {};

inline void dot_int8(NarrowRows& dot, ByteCodes codes, const std::int8_t* x) {
  std::int32_t four;
  std::memcpy(&four, x, sizeof(four));
  const __m256i columns = _mm256_set1_epi32(four);
  const __m256i magnitudes = _mm256_abs_epi8(columns);
  const auto dots = [&](__m256i values) {
    return _mm256_maddubs_epi16(magnitudes, _mm256_sign_epi8(values, columns));
  };
  dot.even = _mm256_add_epi16(dot.even, dots(codes.even));
  dot.odd = _mm256_add_epi16(dot.odd, dots(codes.odd));
}

// Calls function.template operator()<DOTS>() with the fastest dots for a group's values; all have
// the same bits.
template <q4nx::Layout LAYOUT, typename Function>
[[gnu::always_inline]] inline void with_dots(const Q4NXRows& weight, std::int64_t group,
                                             const Function& function) {
  if constexpr (LAYOUT.has_table) {
    const __m128i table =
        _mm_abs_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(weight.table(group))));
    const __m128i larger = _mm_subs_epu8(table, _mm_set1_epi8(15));
    if (_mm_testz_si128(larger, larger) != 0) return function.template operator()<NarrowRows>();
  }
  function.template operator()<std::conditional_t<LAYOUT.is_signed(), SignedRows, IntegerRows>>();
}

inline __m256 scaled(__m256i dot, __m256 scale) {
  const __m256i both = _mm256_madd_epi16(dot, _mm256_set1_epi16(1));
  return _mm256_mul_ps(_mm256_cvtepi32_ps(both), scale);
}

inline void add_group(Rows& total, IntegerRows dot, float activation_scale, Rows scale,
                      Rows minimum, float sum) {
  const __m256 s = _mm256_set1_ps(activation_scale);
  add_group(total, Rows{scaled(dot.even, s), scaled(dot.odd, s)}, scale, minimum, sum);
}

inline void add_group(Rows& total, SignedRows dot, float activation_scale, Rows scale, Rows minimum,
                      float sum) {
  const __m256 s = _mm256_set1_ps(activation_scale);
  add_group(total,
            Rows{_mm256_mul_ps(_mm256_cvtepi32_ps(dot.even), s),
                 _mm256_mul_ps(_mm256_cvtepi32_ps(dot.odd), s)},
            scale, minimum, sum);
}

// Values of four columns of a strip, one by one in f32.
template <q4nx::Layout LAYOUT>
struct FourColumns {
  ByteCodes codes;

  FourColumns(const Q4NXRows& weight, std::int64_t group, int strip, int quad)
      : codes(byte_codes<LAYOUT>(weight, group, strip, quad)) {}

  template <int COLUMN>
  Rows column() const {
    const auto widen = [](__m256i four) {
      return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(four, 24 - 8 * COLUMN), 24));
    };
    return {widen(codes.even), widen(codes.odd)};
  }
};

// Codes that stand for themselves need no transposition.
template <q4nx::Layout LAYOUT>
  requires(!LAYOUT.is_signed())
struct FourColumns<LAYOUT> {
  const std::uint8_t* codes;

  FourColumns(const Q4NXRows& weight, std::int64_t group, int strip, int quad)
      : codes(weight.codes(group, strip) + quad * 4 * q4nx::kColumnBytes) {}

  template <int COLUMN>
  Rows column() const {
    const __m256i bytes = _mm256_cvtepu8_epi32(
        _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + COLUMN * q4nx::kColumnBytes)));
    return {_mm256_cvtepi32_ps(_mm256_and_si256(bytes, _mm256_set1_epi32(0x0f))),
            _mm256_cvtepi32_ps(_mm256_srli_epi32(bytes, 4))};
  }
};

inline void store_codes(Rows codes, float* unpacked) {
  _mm256_store_ps(unpacked, codes.even);
  _mm256_store_ps(unpacked + 8, codes.odd);
}

inline Rows load_codes(const float* unpacked) {
  return {_mm256_load_ps(unpacked), _mm256_load_ps(unpacked + 8)};
}

inline void dot_float(Rows& dot, Rows codes, const float* x) {
  const __m256 column = _mm256_broadcast_ss(x);
  dot.even = _mm256_fmadd_ps(codes.even, column, dot.even);
  dot.odd = _mm256_fmadd_ps(codes.odd, column, dot.odd);
}

// Rows of activations in registers. With 4 rows the dots of a strip take 8 of 16 registers; the
// others hold weights, activations and products. Each step is two instructions on 8 dots and 6
// loads, so more rows would not make it faster.
constexpr int kTileInt8 = 4;
// 12 dots: a fused multiply-add has a latency of 4 to 5 cycles, and two are begun in each.
constexpr int kTileBFloat16 = 6;

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
