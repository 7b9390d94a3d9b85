// SPDX-License-Identifier: Apache-2.0
// Q4NXMatMul in AVX2 + FMA: codes are unpacked once for many rows of activations.
//
// Dataflow, for each stretch of columns whose unpacked codes fill half of an L1 data cache: unpack
// 32 rows of codes; then for each tile of rows of activations and each strip: the totals come from
// `out`, each group's dots are accumulated in registers and scaled into them, and they go back. The
// order of operations for one result is that of FusedDQP, so it does not depend on the number of
// rows in a call, and neither do its bits.
#pragma once

#include <algorithm>

#include "ops/cpu/kernels/products/fused_dqp_avx2.h"
#include "ops/cpu/kernels/products/with_layout.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// Rows of activations in registers: with 4 the dots of a strip are 8 of 16 registers, which leaves
// some for weights, activations and products. As each step is two instructions on 8 dots and 6
// loads, more rows would not make it faster.
constexpr int kTileInt8 = 4;
// 12 dots: a fused multiply-add has a latency of 4 to 5 cycles, and two are begun in each.
constexpr int kTileBFloat16 = 6;
// Half of an L1 data cache of 32 KB: unpacked codes of 512 columns in bytes, or of 128 in f32.
constexpr std::int64_t kUnpackedBytes = 16 * 1024;
static_assert(kUnpackedBytes <= static_cast<std::int64_t>(kMatMulScratchBytes));
constexpr std::int64_t kInt8Groups = kUnpackedBytes / (q4nx::kBlockRows * kGroup);
constexpr std::int64_t kBFloat16Groups = kInt8Groups / static_cast<int>(sizeof(float));

// Groups whose codes are unpacked together: scratch [strip][columns or quadruples of them][even,
// odd].
struct Stretch {
  Q4NXRows weight;
  std::int64_t first_group;
  std::int64_t groups;
};

inline void unpack_int8(const Stretch& stretch, std::byte* unpacked) {
  for (int strip = 0; strip < kStrips; ++strip) {
    for (std::int64_t g = 0; g < stretch.groups; ++g) {
      const std::uint8_t* codes = stretch.weight.codes(stretch.first_group + g, strip);
      for (int quad = 0; quad < kGroup / 4; ++quad) {
        const ByteCodes four = byte_codes(codes + quad * 4 * q4nx::kColumnBytes);
        _mm256_store_si256(reinterpret_cast<__m256i*>(unpacked), four.even);
        _mm256_store_si256(reinterpret_cast<__m256i*>(unpacked + 32), four.odd);
        unpacked += 64;
      }
    }
  }
}

inline void unpack_float(const Stretch& stretch, float* unpacked) {
  for (int strip = 0; strip < kStrips; ++strip) {
    for (std::int64_t g = 0; g < stretch.groups; ++g) {
      const std::uint8_t* codes = stretch.weight.codes(stretch.first_group + g, strip);
      for (int column = 0; column < kGroup; ++column) {
        const Rows one = float_codes(codes + column * q4nx::kColumnBytes);
        _mm256_store_ps(unpacked, one.even);
        _mm256_store_ps(unpacked + 8, one.odd);
        unpacked += 16;
      }
    }
  }
}

// COUNT rows of activations from `row` times a stretch of one strip; `out` is the strip's.
template <int COUNT>
void tile_int8(const Stretch& stretch, const std::byte* unpacked, int strip,
               const RoundedActivations& a, std::int64_t row, float* out) {
  const std::int64_t first = stretch.first_group;
  const auto* x = static_cast<const std::int8_t*>(a.values) + row * a.padded_k + first * kGroup;
  const float* scales = a.scales + row * a.groups + first;
  const float* sums = a.sums + row * a.groups + first;
  Rows total[COUNT];
  if (first > 0) {
    for (int r = 0; r < COUNT; ++r) total[r] = load_rows(out + r * q4nx::kBlockRows);
  }
  for (std::int64_t g = 0; g < stretch.groups; ++g, ++scales, ++sums) {
    // Unrolled whole by GCC, the loop adds the products in an order that no 16 registers can hold:
    // a quarter of the speed.
    IntegerRows dot[COUNT];
#pragma GCC unroll 4
    for (int quad = 0; quad < kGroup / 4; ++quad, unpacked += 64, x += 4) {
      const ByteCodes codes{load_bytes(unpacked), load_bytes(unpacked + 32)};
      for (int r = 0; r < COUNT; ++r) dot_int8(dot[r], codes, x + r * a.padded_k);
    }
    const auto [scale, minimum] = load_parameters(stretch.weight, first + g, strip);
    for (int r = 0; r < COUNT; ++r) {
      add_group(total[r], dot[r], scales[r * a.groups], scale, minimum, sums[r * a.groups]);
    }
  }
  for (int r = 0; r < COUNT; ++r) store_rows(total[r], out + r * q4nx::kBlockRows);
}

// Likewise; `x` has the activations in f32, [COUNT][columns of the stretch].
template <int COUNT>
void tile_float(const Stretch& stretch, const float* unpacked, int strip,
                const RoundedActivations& a, std::int64_t row, const float* x, float* out) {
  const std::int64_t first = stretch.first_group;
  const std::int64_t columns = stretch.groups * kGroup;
  const float* sums = a.sums + row * a.groups + first;
  Rows total[COUNT];
  if (first > 0) {
    for (int r = 0; r < COUNT; ++r) total[r] = load_rows(out + r * q4nx::kBlockRows);
  }
  for (std::int64_t g = 0; g < stretch.groups; ++g, ++sums) {
    Rows dot[COUNT];
    for (int column = 0; column < kGroup; ++column, unpacked += 16, ++x) {
      const Rows codes{_mm256_load_ps(unpacked), _mm256_load_ps(unpacked + 8)};
      for (int r = 0; r < COUNT; ++r) dot_float(dot[r], codes, x + r * columns);
    }
    const auto [scale, minimum] = load_parameters(stretch.weight, first + g, strip);
    for (int r = 0; r < COUNT; ++r) {
      add_group(total[r], dot[r], scale, minimum, sums[r * a.groups]);
    }
  }
  for (int r = 0; r < COUNT; ++r) store_rows(total[r], out + r * q4nx::kBlockRows);
}

inline void matmul_int8(const Q4NXRows& weight, const RoundedActivations& a, std::int64_t first,
                        std::int64_t count, std::byte* scratch, float* out) {
  if (count <= kFusedRows) {
    return with_count<kFusedRows>(count, [&]<int COUNT>() {
      with_layout(weight.layout, [&]<q4nx::Layout LAYOUT>() {
        fused_dqp_int8<COUNT, LAYOUT>(weight, a, first, out);
      });
    });
  }
  for (std::int64_t group = 0; group < a.filled_groups; group += kInt8Groups) {
    const Stretch stretch{weight, group, std::min(kInt8Groups, a.filled_groups - group)};
    unpack_int8(stretch, scratch);
    for (std::int64_t row = 0; row < count; row += kTileInt8) {
      with_count<kTileInt8>(std::min<std::int64_t>(kTileInt8, count - row), [&]<int COUNT>() {
        for (int strip = 0; strip < kStrips; ++strip) {
          tile_int8<COUNT>(stretch, scratch + strip * stretch.groups * kGroup * kStripRows, strip,
                           a, first + row, out + row * q4nx::kBlockRows + strip * kStripRows);
        }
      });
    }
  }
}

inline void matmul_bf16(const Q4NXRows& weight, const RoundedActivations& a, std::int64_t first,
                        std::int64_t count, std::byte* scratch, float* out) {
  if (count <= kFusedRows) {
    return with_count<kFusedRows>(count, [&]<int COUNT>() {
      with_layout(weight.layout, [&]<q4nx::Layout LAYOUT>() {
        fused_dqp_bf16<COUNT, LAYOUT>(weight, a, first, out);
      });
    });
  }
  auto* unpacked = reinterpret_cast<float*>(scratch);
  for (std::int64_t group = 0; group < a.filled_groups; group += kBFloat16Groups) {
    const Stretch stretch{weight, group, std::min(kBFloat16Groups, a.filled_groups - group)};
    const std::int64_t columns = stretch.groups * kGroup;
    unpack_float(stretch, unpacked);
    for (std::int64_t row = 0; row < count; row += kTileBFloat16) {
      with_count<kTileBFloat16>(
          std::min<std::int64_t>(kTileBFloat16, count - row), [&]<int COUNT>() {
            alignas(32) float x[COUNT * kBFloat16Groups * kGroup];
            widen(a, first + row, COUNT, group * kGroup, columns, x);
            for (int strip = 0; strip < kStrips; ++strip) {
              tile_float<COUNT>(stretch, unpacked + strip * columns * kStripRows, strip, a,
                                first + row, x, out + row * q4nx::kBlockRows + strip * kStripRows);
            }
          });
    }
  }
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
