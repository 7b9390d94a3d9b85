// SPDX-License-Identifier: Apache-2.0
// Q4NXMatMul in AVX2 + FMA or in NEON: codes are unpacked once for many rows of activations.
//
// Dataflow, for each range of columns whose unpacked codes fill half of an L1 data cache: unpack
// 32 rows of codes; then for each tile of rows of activations and each strip: the totals come from
// `out`, each group's dots are accumulated in registers and scaled into them, and they go back. The
// order of operations for one result is that of FusedDQP, so it does not depend on the number of
// rows in a call, and neither do its bits.
#pragma once

#include <algorithm>

#if defined(__ARM_FEATURE_MATMUL_INT8)
#include "ops/cpu/kernels/products/neon/matrices.h"
#else
#include "ops/cpu/kernels/products/dots_int8.h"
#endif
#include "ops/cpu/kernels/products/fused_dqp.h"
#include "ops/cpu/kernels/products/with_layout.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// Half of an L1 data cache of 32 KB: unpacked codes of 512 columns in bytes, or of 128 in f32.
constexpr std::int64_t kUnpackedBytes = 16 * 1024;
static_assert(kUnpackedBytes <= static_cast<std::int64_t>(kMatMulScratchBytes));
constexpr std::int64_t kInt8Groups = kUnpackedBytes / (q4nx::kBlockRows * kGroup);
constexpr std::int64_t kBFloat16Groups = kInt8Groups / static_cast<int>(sizeof(float));

template <q4nx::Layout LAYOUT>
void unpack_float(const GroupRange& range, float* unpacked) {
  const Q4NXRows weight = range.rows<LAYOUT>();
  for (int strip = 0; strip < kStrips; ++strip) {
    for (std::int64_t g = range.first_group; g < range.first_group + range.groups; ++g) {
      for_each_column<LAYOUT>(weight, g, strip, [&](Rows codes, int) {
        store_codes(codes, unpacked);
        unpacked += kStripRows;
      });
    }
  }
}

// COUNT rows of activations from `row` times a range of one strip; `out` begins at the strip's
// rows, and `x` has the activations in f32, [COUNT][columns of the range].
template <int COUNT>
void tile_float(const GroupRange& range, const float* unpacked, int strip,
                const RoundedActivations& a, std::int64_t row, const float* x, float* out) {
  const std::int64_t first = range.first_group;
  const std::int64_t columns = range.groups * kGroup;
  const float* sums = a.sums + row * a.groups + first;
  Rows total[COUNT];
  if (first > 0) {
    for (int r = 0; r < COUNT; ++r) total[r] = load_rows(out + r * q4nx::kBlockRows);
  }
  for (std::int64_t g = 0; g < range.groups; ++g, ++sums) {
    Rows dot[COUNT];
    for (int column = 0; column < kGroup; ++column, unpacked += 16, ++x) {
      const Rows codes = load_codes(unpacked);
      for (int r = 0; r < COUNT; ++r) dot_float(dot[r], codes, x + r * columns);
    }
    const auto [scale, minimum] = load_parameters(range.weight, first + g, strip);
    for (int r = 0; r < COUNT; ++r) {
      add_group(total[r], dot[r], scale, minimum, sums[r * a.groups]);
    }
  }
  for (int r = 0; r < COUNT; ++r) store_rows(total[r], out + r * q4nx::kBlockRows);
}

template <q4nx::Layout LAYOUT>
void multiply_range(const GroupRange& range, const RoundedActivations& a, std::int64_t first,
                    std::int64_t count, const std::byte* unpacked, float* out) {
  for (std::int64_t row = 0; row < count; row += kTileInt8) {
    with_count<kTileInt8>(std::min<std::int64_t>(kTileInt8, count - row), [&]<int COUNT>() {
      for (int strip = 0; strip < kStrips; ++strip) {
        tile_int8<COUNT, LAYOUT>(range, unpacked + strip * range.groups * kGroup * kStripRows,
                                 strip, a, first + row,
                                 out + row * q4nx::kBlockRows + strip * kStripRows);
      }
    });
  }
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
    const GroupRange range{weight, group, std::min(kInt8Groups, a.filled_groups - group)};
    with_layout(weight.layout, [&]<q4nx::Layout LAYOUT>() {
      unpack_int8<LAYOUT>(range, scratch);
      multiply_range<LAYOUT>(range, a, first, count, scratch, out);
    });
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
    const GroupRange range{weight, group, std::min(kBFloat16Groups, a.filled_groups - group)};
    const std::int64_t columns = range.groups * kGroup;
    with_layout(weight.layout,
                [&]<q4nx::Layout LAYOUT>() { unpack_float<LAYOUT>(range, unpacked); });
    for (std::int64_t row = 0; row < count; row += kTileBFloat16) {
      with_count<kTileBFloat16>(
          std::min<std::int64_t>(kTileBFloat16, count - row), [&]<int COUNT>() {
            alignas(32) float x[COUNT * kBFloat16Groups * kGroup];
            widen(a, first + row, COUNT, group * kGroup, columns, x);
            for (int strip = 0; strip < kStrips; ++strip) {
              tile_float<COUNT>(range, unpacked + strip * columns * kStripRows, strip, a,
                                first + row, x, out + row * q4nx::kBlockRows + strip * kStripRows);
            }
          });
    }
  }
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
