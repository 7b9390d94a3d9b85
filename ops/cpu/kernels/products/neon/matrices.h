// SPDX-License-Identifier: Apache-2.0
// Many rows of int8 activations times unpacked codes, by products of matrices of 2 x 8 bytes
// (Armv8.6's FEAT_I8MM, smmla), in place of dots_int8.h, which needs dot products alone.
//
// Scratch: [strip][eight columns][8 registers of two rows by eight columns]: rows 0 and 2; 1 and 3;
// 4 and 6; 5 and 7; and so on. So two registers of results, each for two rows of activations,
// interleave to four consecutive rows of the weight.
#pragma once

#include <algorithm>

#include "ops/cpu/kernels/products/group_range.h"
#include "ops/cpu/kernels/products/neon/q4nx.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

constexpr int kMatrixColumns = 8;
// Registers of two rows by 8 columns in a strip.
constexpr int kMatrices = kStripRows / 2;
constexpr int kFours = kStripRows / 4;

// 8 columns of 8 bytes: transposed, so that 8 columns of a row pair lie together, then split.
inline void unpack_columns(const std::uint8_t* codes, std::int8_t* out) {
  const uint8x16_t columns01 = vld1q_u8(codes);
  const uint8x16_t columns23 = vld1q_u8(codes + 16);
  const uint8x16_t columns45 = vld1q_u8(codes + 32);
  const uint8x16_t columns67 = vld1q_u8(codes + 48);
  const uint8x16_t columns04 = vzip1q_u8(columns01, columns45);
  const uint8x16_t columns15 = vzip2q_u8(columns01, columns45);
  const uint8x16_t columns26 = vzip1q_u8(columns23, columns67);
  const uint8x16_t columns37 = vzip2q_u8(columns23, columns67);
  const uint8x16_t even[] = {vzip1q_u8(columns04, columns26), vzip2q_u8(columns04, columns26)};
  const uint8x16_t odd[] = {vzip1q_u8(columns15, columns37), vzip2q_u8(columns15, columns37)};
  const uint8x16_t pairs[] = {vzip1q_u8(even[0], odd[0]), vzip2q_u8(even[0], odd[0]),
                              vzip1q_u8(even[1], odd[1]), vzip2q_u8(even[1], odd[1])};
  for (const uint8x16_t two : pairs) {
    int8x16_t even_rows;
    int8x16_t odd_rows;
    split_nibbles(two, even_rows, odd_rows);
    vst1q_s8(out, even_rows);
    vst1q_s8(out + 16, odd_rows);
    out += 2 * 2 * kMatrixColumns;
  }
}

inline void unpack_int8(const GroupRange& range, std::byte* unpacked) {
  auto* out = reinterpret_cast<std::int8_t*>(unpacked);
  for (int strip = 0; strip < kStrips; ++strip) {
    for (std::int64_t g = 0; g < range.groups; ++g) {
      const std::uint8_t* codes = range.weight.codes(range.first_group + g, strip);
      for (int column = 0; column < kGroup; column += kMatrixColumns) {
        unpack_columns(codes + column * q4nx::kColumnBytes, out);
        out += kMatrices * 2 * kMatrixColumns;
      }
    }
  }
}

// Scales or minima, bf16, of four rows.
inline float32x4_t load_four(const std::uint8_t* bf16) {
  const uint16x4_t four = vreinterpret_u16_u8(vld1_u8(bf16));
  return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(four), 16));
}

// COUNT rows of activations from `row` times a range of one strip; `out` begins at the strip's
// rows. If COUNT is odd, the last row is computed twice.
template <int COUNT>
void tile_int8(const GroupRange& range, const std::byte* unpacked, int strip,
               const RoundedActivations& a, std::int64_t row, float* out) {
  constexpr int kPairs = (COUNT + 1) / 2;
  const std::int64_t first = range.first_group;
  const auto* x = static_cast<const std::int8_t*>(a.values) + row * a.padded_k + first * kGroup;
  const auto* codes = reinterpret_cast<const std::int8_t*>(unpacked);
  const float* scales = a.scales + row * a.groups + first;
  const float* sums = a.sums + row * a.groups + first;
  float32x4_t total[COUNT][kFours] = {};
  if (first > 0) {
    for (int r = 0; r < COUNT; ++r) {
      for (int f = 0; f < kFours; ++f) total[r][f] = vld1q_f32(out + r * q4nx::kBlockRows + f * 4);
    }
  }
  for (std::int64_t g = 0; g < range.groups; ++g, ++scales, ++sums) {
    int32x4_t dot[kPairs][kMatrices] = {};
    for (int column = 0; column < kGroup; column += kMatrixColumns, x += kMatrixColumns) {
      int8x16_t two[kPairs];
      for (int p = 0; p < kPairs; ++p) {
        two[p] = vcombine_s8(vld1_s8(x + 2 * p * a.padded_k),
                             vld1_s8(x + std::min(2 * p + 1, COUNT - 1) * a.padded_k));
      }
      for (int i = 0; i < kMatrices; ++i, codes += 2 * kMatrixColumns) {
        const int8x16_t rows = vld1q_s8(codes);
        for (int p = 0; p < kPairs; ++p) dot[p][i] = vmmlaq_s32(dot[p][i], two[p], rows);
      }
    }
    const std::int64_t offset = strip * q4nx::kStripRows * 2;
    const std::uint8_t* row_scales = range.weight.scales(first + g) + offset;
    const std::uint8_t* minima = range.weight.minima(first + g);
    for (int f = 0; f < kFours; ++f) {
      const float32x4_t scale = load_four(row_scales + f * 8);
      const float32x4_t minimum = minima == nullptr ? vmulq_n_f32(scale, q4nx::kMinimumOfSymmetric)
                                                    : load_four(minima + offset + f * 8);
      for (int r = 0; r < COUNT; ++r) {
        const int32x4_t even = dot[r / 2][2 * f];
        const int32x4_t odd = dot[r / 2][2 * f + 1];
        const int32x4_t four = r % 2 == 0 ? vzip1q_s32(even, odd) : vzip2q_s32(even, odd);
        const float32x4_t scaled = vmulq_n_f32(vcvtq_f32_s32(four), scales[r * a.groups]);
        total[r][f] =
            vfmaq_n_f32(vfmaq_f32(total[r][f], scaled, scale), minimum, sums[r * a.groups]);
      }
    }
  }
  for (int r = 0; r < COUNT; ++r) {
    for (int f = 0; f < kFours; ++f) vst1q_f32(out + r * q4nx::kBlockRows + f * 4, total[r][f]);
  }
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
