// SPDX-License-Identifier: Apache-2.0
// Q4NX in registers of NEON with dot products (Armv8.2's FEAT_DotProd): the same functions as
// q4nx_avx2.h has for AVX2, so that FusedDQP and Q4NXMatMul have one source for both.
//
// Layout: 8 bytes of a column are the 8 row pairs of a strip: low nibble row 2i, high nibble row
// 2i+1. A strip of 16 rows is four registers of four lanes, Rows: rows 0, 2, 4, 6; rows 1, 3, 5, 7;
// rows 8, 10, 12, 14; rows 9, 11, 13, 15. int8 activations: a lane has four columns, a byte each.
// bf16: a lane has one column in f32.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "ops/cpu/kernels.h"
#include "ops/cpu/kernels/vector.h"
#include "ops/cpu/kernels/with_count.h"
#include "ops/cpu/q4nx_rows.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

constexpr int kStrips = 2;
constexpr int kStripRows = 16;
constexpr std::int64_t kGroup = q4nx::kGroup;
constexpr int kRowVectors = kStripRows / kLanes;

// 16 rows in f32, in the order above.
struct Rows {
  float32x4_t part[kRowVectors] = {};
};

inline Rows load_group_rows(const std::uint8_t* bf16) {
  Rows rows;
  for (int half = 0; half < 2; ++half, bf16 += 16) {
    const uint32x4_t pairs = vreinterpretq_u32_u8(vld1q_u8(bf16));
    rows.part[2 * half] = vreinterpretq_f32_u32(vshlq_n_u32(pairs, 16));
    rows.part[2 * half + 1] = vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(0xffff0000U)));
  }
  return rows;
}

inline void store_rows(const Rows& rows, float* out) {
  const float32x4x2_t first = {{rows.part[0], rows.part[1]}};
  const float32x4x2_t second = {{rows.part[2], rows.part[3]}};
  vst2q_f32(out, first);
  vst2q_f32(out + 8, second);
}

inline Rows load_rows(const float* in) {
  const float32x4x2_t first = vld2q_f32(in);
  const float32x4x2_t second = vld2q_f32(in + 8);
  return {{first.val[0], first.val[1], second.val[0], second.val[1]}};
}

// Scales and minima of a strip's rows in a group of 32 columns.
struct Parameters {
  Rows scale;
  Rows minimum;
};

inline Parameters load_parameters(const Q4NXRows& weight, std::int64_t group, int strip) {
  const std::int64_t offset = strip * q4nx::kStripRows * 2;
  Parameters parameters;
  parameters.scale = load_group_rows(weight.scales(group) + offset);
  if (weight.layout.has_minima) {
    parameters.minimum = load_group_rows(weight.minima(group) + offset);
  } else {
    for (int i = 0; i < kRowVectors; ++i) {
      parameters.minimum.part[i] =
          vmulq_n_f32(parameters.scale.part[i], weight.layout.minimum_of_symmetric());
    }
  }
  return parameters;
}

// total += dot * scale + minimum * (sum of activations): eq. 3 taken out of the sum over a group.
inline void add_group(Rows& total, const Rows& dot, const Rows& scale, const Rows& minimum,
                      float sum) {
  for (int i = 0; i < kRowVectors; ++i) {
    const float32x4_t product = vfmaq_f32(total.part[i], dot.part[i], scale.part[i]);
    total.part[i] = vfmaq_n_f32(product, minimum.part[i], sum);
  }
}

// Codes of four columns as bytes, four in a lane.
struct ByteCodes {
  int8x16_t part[kRowVectors];
};

inline void split_nibbles(uint8x16_t bytes, int8x16_t& even, int8x16_t& odd) {
  even = vreinterpretq_s8_u8(vandq_u8(bytes, vdupq_n_u8(0x0f)));
  odd = vreinterpretq_s8_u8(vshrq_n_u8(bytes, 4));
}

// 4 columns of 8 bytes -> lane i: row pair i of 4 columns.
inline ByteCodes byte_codes(const std::uint8_t* codes) {
  constexpr std::uint8_t kTranspose[] = {0,  8,  16, 24, 1,  9,  17, 25, 2,  10, 18,
                                         26, 3,  11, 19, 27, 4,  12, 20, 28, 5,  13,
                                         21, 29, 6,  14, 22, 30, 7,  15, 23, 31};
  const uint8x16x2_t columns = {{vld1q_u8(codes), vld1q_u8(codes + 16)}};
  ByteCodes four;
  split_nibbles(vqtbl2q_u8(columns, vld1q_u8(kTranspose)), four.part[0], four.part[1]);
  split_nibbles(vqtbl2q_u8(columns, vld1q_u8(kTranspose + 16)), four.part[2], four.part[3]);
  return four;
}

// Values of four columns of a strip.
template <q4nx::Layout LAYOUT>
inline ByteCodes byte_codes(const Q4NXRows& weight, std::int64_t group, int strip, int quad) {
  ByteCodes four;
  if constexpr (LAYOUT.code_bits == 8) {
    const auto* codes = reinterpret_cast<const std::int8_t*>(weight.codes(group, 0)) +
                        quad * q4nx::kByteQuadBytes + strip * kStripRows * 2;
    for (int i = 0; i < kRowVectors; ++i)
      four.part[i] = vld1q_s8(codes + i % 2 * (q4nx::kByteQuadBytes / 2) + i / 2 * 16);
    return four;
  }
  four = byte_codes(weight.codes(group, strip) + quad * 4 * q4nx::kColumnBytes);
  if constexpr (LAYOUT.has_table) {
    const int8x16_t table = vreinterpretq_s8_u8(vld1q_u8(weight.table(group)));
    for (int8x16_t& codes : four.part) codes = vqtbl1q_s8(table, vreinterpretq_u8_s8(codes));
  }
  return four;
}

inline void store_codes(const ByteCodes& codes, std::byte* unpacked) {
  auto* out = reinterpret_cast<std::int8_t*>(unpacked);
  for (int i = 0; i < kRowVectors; ++i) vst1q_s8(out + i * 16, codes.part[i]);
}

inline ByteCodes load_codes(const std::byte* unpacked) {
  const auto* in = reinterpret_cast<const std::int8_t*>(unpacked);
  return {{vld1q_s8(in), vld1q_s8(in + 16), vld1q_s8(in + 32), vld1q_s8(in + 48)}};
}

// The dots of a strip's codes with activations.
struct IntegerRows {
  int32x4_t part[kRowVectors] = {};
};

// Calls function.template operator()<DOTS>() with the dots for a group's values.
template <q4nx::Layout LAYOUT, typename Function>
[[gnu::always_inline]] inline void with_dots(const Q4NXRows& /*weight*/, std::int64_t /*group*/,
                                             const Function& function) {
  function.template operator()<IntegerRows>();
}

inline void dot_int8(IntegerRows& dot, const ByteCodes& codes, const std::int8_t* x) {
  std::int32_t four;
  std::memcpy(&four, x, sizeof(four));
  const int8x16_t columns = vreinterpretq_s8_s32(vdupq_n_s32(four));
  for (int i = 0; i < kRowVectors; ++i)
    dot.part[i] = vdotq_s32(dot.part[i], codes.part[i], columns);
}

inline void add_group(Rows& total, const IntegerRows& dot, float activation_scale,
                      const Rows& scale, const Rows& minimum, float sum) {
  Rows scaled;
  for (int i = 0; i < kRowVectors; ++i)
    scaled.part[i] = vmulq_n_f32(vcvtq_f32_s32(dot.part[i]), activation_scale);
  add_group(total, scaled, scale, minimum, sum);
}

// Values of four columns of a strip, one by one in f32.
template <q4nx::Layout LAYOUT>
struct FourColumns {
  ByteCodes codes;

  FourColumns(const Q4NXRows& weight, std::int64_t group, int strip, int quad)
      : codes(byte_codes<LAYOUT>(weight, group, strip, quad)) {}

  template <int COLUMN>
  Rows column() const {
    Rows rows;
    for (int i = 0; i < kRowVectors; ++i) {
      const int32x4_t four = vreinterpretq_s32_s8(codes.part[i]);
      rows.part[i] = vcvtq_f32_s32(vshrq_n_s32(vshlq_n_s32(four, 24 - 8 * COLUMN), 24));
    }
    return rows;
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
    const uint16x8_t bytes = vmovl_u8(vld1_u8(codes + COLUMN * q4nx::kColumnBytes));
    Rows rows;
    for (int half = 0; half < 2; ++half) {
      const uint32x4_t four = vmovl_u16(half == 0 ? vget_low_u16(bytes) : vget_high_u16(bytes));
      rows.part[2 * half] = vcvtq_f32_u32(vandq_u32(four, vdupq_n_u32(0x0f)));
      rows.part[2 * half + 1] = vcvtq_f32_u32(vshrq_n_u32(four, 4));
    }
    return rows;
  }
};

inline void store_codes(const Rows& codes, float* unpacked) {
  for (int i = 0; i < kRowVectors; ++i) vst1q_f32(unpacked + i * kLanes, codes.part[i]);
}

inline Rows load_codes(const float* unpacked) {
  return {{vld1q_f32(unpacked), vld1q_f32(unpacked + 4), vld1q_f32(unpacked + 8),
           vld1q_f32(unpacked + 12)}};
}

inline void dot_float(Rows& dot, const Rows& codes, const float* x) {
  for (int i = 0; i < kRowVectors; ++i) dot.part[i] = vfmaq_n_f32(dot.part[i], codes.part[i], *x);
}

// Rows of activations in registers. Of 32 registers, 4 x 4 have dots and 4 codes; at the end of a
// group, scales, minima and totals take turns in the rest.
constexpr int kTileInt8 = 4;
// 6 x 4 dots hide a latency of 4 cycles at as many as four fused multiply-adds a cycle.
constexpr int kTileBFloat16 = 6;

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
