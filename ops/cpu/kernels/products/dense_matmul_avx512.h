// SPDX-License-Identifier: Apache-2.0
// DenseMatMul in AVX-512, with dot products of int8 (dense_matmul_int8_avx512.h) or of bf16.
//
// bf16: weights are rounded to bf16 where they are not. Packed: [k / 2][even, odd][16 lanes of 2].
#pragma once

#include <algorithm>

#include "ops/cpu/kernels/products/dense_matmul_int8_avx512.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// 12 x 2 sums leave 8 of 32 registers for weights and activations.
constexpr int kBFloat16Rows = 12;
constexpr std::int64_t kPairBytes = 2 * 64;
// Groups of 32 of k whose packed columns fill the scratch of other products: 32 KB, for L1.
constexpr std::int64_t kBFloat16Stretch = 32 * 1024 / (kPairBytes * q4nx::kGroup / 2);

inline std::int64_t bf16_block_bytes(std::int64_t k) {
  return q4nx::ceil_div(k, q4nx::kGroup) * q4nx::kGroup / 2 * kPairBytes;
}

inline void pack_bf16(const DenseWeight& weight, std::int64_t block, std::byte* packed) {
  alignas(64) float columns[q4nx::kGroup * kDenseColumns];
  for (std::int64_t k = 0; k < weight.k; k += q4nx::kGroup) {
    const std::int64_t count = std::min(q4nx::kGroup, weight.k - k);
    widen_columns(weight, k, count, block, columns);
    scale_columns(weight, count, block, columns);
    std::fill(columns + count * kDenseColumns, std::end(columns), 0.0F);
    for (std::int64_t i = 0; i < q4nx::kGroup; i += 2, packed += kPairBytes) {
      const Rows low = load_rows(columns + i * kDenseColumns);
      const Rows high = load_rows(columns + (i + 1) * kDenseColumns);
      const Bits even = bf16_bits(low.even) | (bf16_bits(high.even) << 16);
      const Bits odd = bf16_bits(low.odd) | (bf16_bits(high.odd) << 16);
      std::memcpy(packed, &even, sizeof(even));
      std::memcpy(packed + 64, &odd, sizeof(odd));
    }
  }
}

// COUNT rows of activations times `groups` groups of k from `group` on, added to what is in `out`
// from the groups before, as in dense_matmul_float.h.
template <int COUNT>
void tile_dense_bf16(const std::byte* packed, const RoundedActivations& a, std::int64_t row,
                     std::int64_t group, std::int64_t groups, float* out) {
  const auto* x =
      static_cast<const std::uint16_t*>(a.values) + row * a.padded_k + group * q4nx::kGroup;
  packed += group * (q4nx::kGroup / 2) * kPairBytes;
  Rows total[COUNT];
  for (std::int64_t pair = 0; pair < groups * q4nx::kGroup / 2;
       ++pair, packed += kPairBytes, x += 2) {
    const __m512i even = _mm512_load_si512(packed);
    const __m512i odd = _mm512_load_si512(packed + 64);
    for (int r = 0; r < COUNT; ++r)
      dot_bf16(total[r], even, odd, broadcast_activations(x + r * a.padded_k));
  }
  for (int r = 0; r < COUNT; ++r, out += kDenseColumns) {
    if (group > 0) {
      const Rows before = load_rows(out);
      total[r] = {_mm512_add_ps(before.even, total[r].even),
                  _mm512_add_ps(before.odd, total[r].odd)};
    }
    store_rows(total[r], out);
  }
}

inline void dense_bf16(const std::byte* packed, const RoundedActivations& a, std::int64_t first,
                       std::int64_t count, float* out) {
  for (std::int64_t group = 0; group < a.filled_groups; group += kBFloat16Stretch) {
    const std::int64_t groups = std::min(kBFloat16Stretch, a.filled_groups - group);
    constexpr std::int64_t kPackedBytes = q4nx::kGroup / 2 * kPairBytes;
    StretchFetch fetch(packed + (group + groups) * kPackedBytes, kBFloat16Stretch * kPackedBytes,
                       q4nx::ceil_div(count, kBFloat16Rows));
    for (std::int64_t row = 0; row < count; row += kBFloat16Rows) {
      fetch.step();
      with_count<kBFloat16Rows>(std::min<std::int64_t>(kBFloat16Rows, count - row),
                                [&]<int COUNT>() {
                                  tile_dense_bf16<COUNT>(packed, a, first + row, group, groups,
                                                         out + row * kDenseColumns);
                                });
    }
  }
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
