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

// Twice four columns of rows 0, 2, 4, 6, or of others, to eight of each row.
inline void join_columns(int8x16_t left, int8x16_t right, std::int8_t* out) {
  const int32x4_t four = vreinterpretq_s32_s8(left);
  const int32x4_t more = vreinterpretq_s32_s8(right);
  vst1q_s8(out, vreinterpretq_s8_s32(vzip1q_s32(four, more)));
  vst1q_s8(out + 4 * kMatrixColumns, vreinterpretq_s8_s32(vzip2q_s32(four, more)));
}

template <q4nx::Layout LAYOUT>
void unpack_int8(const GroupRange& range, std::byte* unpacked) {
  const Q4NXRows weight = range.rows<LAYOUT>();
  auto* out = reinterpret_cast<std::int8_t*>(unpacked);
  for (int strip = 0; strip < kStrips; ++strip) {
    for (std::int64_t g = range.first_group; g < range.first_group + range.groups; ++g) {
      for (int quad = 0; quad < kGroup / 4; quad += 2) {
        const ByteCodes left = byte_codes<LAYOUT>(weight, g, strip, quad);
        const ByteCodes right = byte_codes<LAYOUT>(weight, g, strip, quad + 1);
        for (int half = 0; half < 2; ++half, out += kMatrices * kMatrixColumns) {
          join_columns(left.part[2 * half], right.part[2 * half], out);
          join_columns(left.part[2 * half + 1], right.part[2 * half + 1], out + 2 * kMatrixColumns);
        }
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
template <int COUNT, q4nx::Layout LAYOUT>
void tile_int8(const GroupRange& range, const std::byte* unpacked, int strip,
               const RoundedActivations& a, std::int64_t row, float* out) {
  constexpr int kPairs = (COUNT + 1) / 2;
  const Q4NXRows weight = range.rows<LAYOUT>();
  const std::int64_t first = range.first_group;
  const auto* x = static_cast<const std::int8_t*>(a.values) + row * a.padded_k + first * kGroup;
  const auto* codes = reinterpret_cast<const std::int8_t*>(unpacked);
  const float* scales = a.scales + row * a.groups + first;
  const float* sums = a.sums + row * a.groups + first;
  const float minimum_in_scales = LAYOUT.minimum_of_symmetric();
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
    const std::uint8_t* row_scales = weight.scales(first + g) + offset;
    const std::uint8_t* minima = weight.minima(first + g);
    for (int f = 0; f < kFours; ++f) {
      const float32x4_t scale = load_four(row_scales + f * 8);
      const float32x4_t minimum = minima == nullptr ? vmulq_n_f32(scale, minimum_in_scales)
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
