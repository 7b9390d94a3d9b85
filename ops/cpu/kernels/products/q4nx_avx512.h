// SPDX-License-Identifier: Apache-2.0
// Q4NX in AVX-512 registers: what FusedDQP and Q4NXMatMul share.
//
// A strip keeps 16 rows of a column in 8 bytes. One zmm of strip 0 and one of strip 1 hold 8
// columns of 32 rows; a byte permutation of the two puts the codes of rows 2i and 2i+1 of several
// columns side by side in 32-bit lane i, low nibbles row 2i, high nibbles row 2i+1. So each pair of
// registers below is {even rows, odd rows} of 32, and scales and minima, stored as bf16 [row],
// split the same way: the low half of lane i is row 2i, the high half row 2i+1. 8-bit codes are
// stored as such pairs of registers, for four columns.
//
// Codes are unsigned here: 8-bit codes, and values of tables, count 128 more than the stored ones,
// and minima belong to the code 0 of these.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <utility>

#include "ops/cpu/q4nx_rows.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// 32 rows in f32: rows 0, 2, .., 30 and rows 1, 3, .., 31.
struct Rows {
  __m512 even = _mm512_setzero_ps();
  __m512 odd = _mm512_setzero_ps();
};

// 32 bf16 [row] -> f32.
inline Rows load_group_rows(const std::uint8_t* bf16) {
  const __m512i pairs = _mm512_loadu_si512(bf16);
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000U));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)),
          _mm512_castsi512_ps(_mm512_and_si512(pairs, high))};
}

// The unsigned code of a stored 8-bit code of 0.
constexpr float kMiddleByte = 128;

struct Parameters {
  Rows scale;
  Rows minimum;
};

// Scale and minimum of a group of 32 columns in the first row of blocks.
inline Parameters load_parameters(const Q4NXRows& weight, std::int64_t group) {
  const Rows scale = load_group_rows(weight.scales(group));
  const bool bytes = weight.layout.is_signed();
  const __m512 factor = _mm512_set1_ps(bytes ? -kMiddleByte : q4nx::kMinimumOfSymmetric);
  if (weight.layout.has_minima) {
    const Rows minimum = load_group_rows(weight.minima(group));
    if (!bytes) return {scale, minimum};
    return {scale,
            {_mm512_fmadd_ps(scale.even, factor, minimum.even),
             _mm512_fmadd_ps(scale.odd, factor, minimum.odd)}};
  }
  return {scale, {_mm512_mul_ps(scale.even, factor), _mm512_mul_ps(scale.odd, factor)}};
}

// Stores the rows in order: out[32].
inline void store_rows(Rows rows, float* out) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high =
      _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  _mm512_storeu_ps(out, _mm512_permutex2var_ps(rows.even, low, rows.odd));
  _mm512_storeu_ps(out + 16, _mm512_permutex2var_ps(rows.even, high, rows.odd));
}

inline Rows load_rows(const float* in) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  const __m512 low = _mm512_loadu_ps(in);
  const __m512 high = _mm512_loadu_ps(in + 16);
  return {_mm512_permutex2var_ps(low, even, high), _mm512_permutex2var_ps(low, odd, high)};
}

// Byte indices for _mm512_permutex2var_epi8(strip 0, index, strip 1). Lane i < 8 is the row pair i
// of strip 0, lane i >= 8 the row pair i - 8 of strip 1 (index bit 6 chooses the strip). Byte c of
// lane i is that pair's byte of column columns[c] of the 8 that a register holds.
struct alignas(64) ColumnIndex {
  std::uint8_t bytes[64];
};

constexpr ColumnIndex column_index(int c0, int c1, int c2, int c3) {
  const int columns[4] = {c0, c1, c2, c3};
  ColumnIndex index{};
  for (int lane = 0; lane < 16; ++lane) {
    for (int byte = 0; byte < 4; ++byte) {
      const int strip = lane >= 8 ? 64 : 0;
      const int column = columns[byte] * static_cast<int>(q4nx::kColumnBytes);
      index.bytes[4 * lane + byte] = static_cast<std::uint8_t>(strip + column + lane % 8);
    }
  }
  return index;
}

// Indices of shuffles. Pairs (bf16): a lane gets two columns, each byte twice. Quads (int8): four
// columns, each once.
constexpr ColumnIndex kColumnPairs[4] = {column_index(0, 0, 1, 1), column_index(2, 2, 3, 3),
                                         column_index(4, 4, 5, 5), column_index(6, 6, 7, 7)};
constexpr ColumnIndex kColumnQuads[2] = {column_index(0, 1, 2, 3), column_index(4, 5, 6, 7)};

inline __m512i load_index(const ColumnIndex& index) { return _mm512_load_si512(index.bytes); }

// Codes 0..15 as bf16, for _mm512_permutexvar_epi16, which reads 5 bits of each index. The table
// stands twice, so that the bit above the nibble has no effect.
inline __m512i bf16_of_code() {
  const __m256i once =
      _mm256_setr_epi16(0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100,
                        0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170);
  return _mm512_broadcast_i64x4(once);
}

// The 16 values of a group's table with 128 added, as bytes; and the same in bf16, which holds 8
// bits, laid out as bf16_of_code.
inline __m128i load_table(const Q4NXRows& weight, std::int64_t group) {
  const __m128i stored = _mm_loadu_si128(reinterpret_cast<const __m128i*>(weight.table(group)));
  return _mm_xor_si128(stored, _mm_set1_epi8(static_cast<char>(0x80)));
}
inline __m512i bf16_of_table(__m128i table) {
  const __m512i floats = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(table)));
  return _mm512_broadcast_i64x4(_mm512_cvtepi32_epi16(_mm512_srli_epi32(floats, 16)));
}

// Codes of two columns in bf16: lane i = (column c, column c + 1) of row 2i, and of row 2i + 1.
struct BFloat16Codes {
  __m512i even;
  __m512i odd;
};

inline BFloat16Codes bf16_codes(__m512i strip0, __m512i strip1, const ColumnIndex& pair,
                                __m512i table) {
  const __m512i bytes = _mm512_permutex2var_epi8(strip0, load_index(pair), strip1);
  return {_mm512_permutexvar_epi16(bytes, table),
          _mm512_permutexvar_epi16(_mm512_srli_epi16(bytes, 4), table)};
}

// Codes of four columns as unsigned bytes, in the same lanes.
struct ByteCodes {
  __m512i even;
  __m512i odd;
};

inline ByteCodes byte_codes(__m512i strip0, __m512i strip1, const ColumnIndex& quad) {
  const __m512i nibble = _mm512_set1_epi8(0x0f);
  const __m512i bytes = _mm512_permutex2var_epi8(strip0, load_index(quad), strip1);
  return {_mm512_and_si512(bytes, nibble), _mm512_and_si512(_mm512_srli_epi16(bytes, 4), nibble)};
}

// 8-bit codes of four columns of 32 rows as they are stored, to unsigned.
inline ByteCodes load_byte_codes(const std::uint8_t* quad) {
  const __m512i middle = _mm512_set1_epi8(static_cast<char>(0x80));
  return {_mm512_xor_si512(_mm512_loadu_si512(quad), middle),
          _mm512_xor_si512(_mm512_loadu_si512(quad + 64), middle)};
}

// Columns 2 PAIR and 2 PAIR + 1 of four unsigned bytes in each lane, in bf16, which has 8 bits.
template <int PAIR>
inline __m512i bf16_of_bytes(__m512i bytes) {
  const __m512i low_byte = _mm512_set1_epi32(0xff);
  const auto to_float = [&](__m512i shifted) {
    return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_and_si512(shifted, low_byte)));
  };
  const __m512i first = to_float(_mm512_srli_epi32(bytes, 16 * PAIR));
  const __m512i second = to_float(_mm512_srli_epi32(bytes, 16 * PAIR + 8));
  return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(first, 16), second);
}

// Eight columns of 32 rows of a weight, from column 8 * eight of a group on.
template <q4nx::Layout LAYOUT>
struct EightColumns {
  __m512i strip0;
  __m512i strip1;

  EightColumns(const Q4NXRows& weight, std::int64_t group, int eight)
      : strip0(_mm512_loadu_si512(weight.codes(group, 0) + eight * 64)),
        strip1(_mm512_loadu_si512(weight.codes(group, 1) + eight * 64)) {}

  // Four columns; and two.
  template <int QUAD>
  ByteCodes quad() const {
    return byte_codes(strip0, strip1, kColumnQuads[QUAD]);
  }
  template <int PAIR>
  BFloat16Codes pair() const {
    return bf16_codes(strip0, strip1, kColumnPairs[PAIR], bf16_of_code());
  }
};

template <q4nx::Layout LAYOUT>
  requires(LAYOUT.has_table)
struct EightColumns<LAYOUT> {
  EightColumns<q4nx::kSymmetric> codes;
  __m128i table;

  EightColumns(const Q4NXRows& weight, std::int64_t group, int eight)
      : codes(weight, group, eight), table(load_table(weight, group)) {}

  template <int QUAD>
  ByteCodes quad() const {
    const __m512i values = _mm512_broadcast_i32x4(table);
    const ByteCodes places = codes.quad<QUAD>();
    return {_mm512_shuffle_epi8(values, places.even), _mm512_shuffle_epi8(values, places.odd)};
  }
  template <int PAIR>
  BFloat16Codes pair() const {
    return bf16_codes(codes.strip0, codes.strip1, kColumnPairs[PAIR], bf16_of_table(table));
  }
};

template <q4nx::Layout LAYOUT>
  requires(LAYOUT.code_bits == 8)
struct EightColumns<LAYOUT> {
  const std::uint8_t* codes;

  EightColumns(const Q4NXRows& weight, std::int64_t group, int eight)
      : codes(weight.codes(group, 0) + eight * 2 * q4nx::kByteQuadBytes) {}

  template <int QUAD>
  ByteCodes quad() const {
    return load_byte_codes(codes + QUAD * q4nx::kByteQuadBytes);
  }
  template <int PAIR>
  BFloat16Codes pair() const {
    const ByteCodes bytes = quad<PAIR / 2>();
    return {bf16_of_bytes<PAIR % 2>(bytes.even), bf16_of_bytes<PAIR % 2>(bytes.odd)};
  }
};

// Calls function.template operator()<I>() for I from 0 to COUNT - 1.
template <int COUNT, typename Function>
[[gnu::always_inline]] inline void unrolled(const Function& function) {
  [&]<int... I>(std::integer_sequence<int, I...>) {
    (function.template operator()<I>(), ...);
  }(std::make_integer_sequence<int, COUNT>());
}

// 4 bytes of activations in every lane. A broadcasting load costs no more than a plain one, and
// serves two products.
inline __m512i broadcast_activations(const void* x) {
  std::int32_t four;
  std::memcpy(&four, x, sizeof(four));
  return _mm512_set1_epi32(four);
}

// dot += pairs of bf16 weights * the pair of bf16 activations x, for 32 rows.
inline void dot_bf16(Rows& dot, __m512i even, __m512i odd, __m512i x) {
  dot.even = _mm512_dpbf16_ps(dot.even, (__m512bh)even, (__m512bh)x);
  dot.odd = _mm512_dpbf16_ps(dot.odd, (__m512bh)odd, (__m512bh)x);
}

// The dots of 32 rows of unsigned codes with signed activations.
struct IntegerRows {
  __m512i even = _mm512_setzero_si512();
  __m512i odd = _mm512_setzero_si512();
};

inline void dot_int8(IntegerRows& dot, __m512i even, __m512i odd, __m512i x) {
  dot.even = _mm512_dpbusd_epi32(dot.even, even, x);
  dot.odd = _mm512_dpbusd_epi32(dot.odd, odd, x);
}

// total += (dot of codes) * scale + minimum * (sum of activations): eq. 3 taken out of the sum over
// a group.
inline void add_group(Rows& total, Rows dot, Rows scale, Rows minimum, const float* sum) {
  const __m512 s = _mm512_set1_ps(*sum);
  total.even = _mm512_fmadd_ps(minimum.even, s, _mm512_fmadd_ps(dot.even, scale.even, total.even));
  total.odd = _mm512_fmadd_ps(minimum.odd, s, _mm512_fmadd_ps(dot.odd, scale.odd, total.odd));
}

// The same for integer dots, whose activations carry a scale of their own.
inline void add_group(Rows& total, IntegerRows dot, const float* activation_scale, Rows scale,
                      Rows minimum, const float* sum) {
  const __m512 a = _mm512_set1_ps(*activation_scale);
  add_group(total,
            {_mm512_mul_ps(_mm512_cvtepi32_ps(dot.even), a),
             _mm512_mul_ps(_mm512_cvtepi32_ps(dot.odd), a)},
            scale, minimum, sum);
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
