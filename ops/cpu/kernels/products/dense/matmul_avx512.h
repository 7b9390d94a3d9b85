// SPDX-License-Identifier: Apache-2.0
// DenseMatMul in AVX-512, with dot products of int8 or of bf16.
//
// int8: 32 columns of the weight x a part of k get one scale and one minimum a column, as
// Q4NXMatMul's 8-bit codes have (q4nx_matmul_int8_avx512.h, whose tile kernel multiplies them): w =
// minimum + scale * u with u in 0 .. 255 and scale = (range of the part's weights) / 255; a weight
// that is int8 is its code less 128, exactly. Packed: for each part of k codes [k / 4][even
// columns, odd columns][16 lanes of 4], then for each part the scales and minima.
//
// bf16: weights are rounded to bf16 where they are not. Packed: [k / 2][even, odd][16 lanes of 2].
#pragma once

#include <algorithm>

#include "ops/cpu/kernels/products/dense/float.h"
#include "ops/cpu/kernels/products/q4nx_matmul_int8_avx512.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

static_assert(kDenseColumns == q4nx::kBlockRows);

// --- int8 -------------------------------------------------------------------------------------

// The most columns of a part of weights that are int8 already. Against 128 columns, 16 passages
// through a dynamic int8 MiniLM take 8 % less CPU time (Zen 5), and its states are off by 0.114 of
// their norm instead of 0.099; in ONNX Runtime they are by 0.197.
constexpr std::int64_t kStoredPart = 384;

inline DenseRounding int8_rounding(DataType weight) {
  return {DenseType::kInt8, kLargestInt8, weight == DataType::kInt8 ? kStoredPart : kDensePart};
}

inline std::int64_t bytes_of_part(std::int64_t columns) {
  return columns * kDenseColumns + static_cast<std::int64_t>(sizeof(Parameters));
}

// Parts whose codes and scales fill an L1 data cache, as the scratch of other products does.
inline std::int64_t parts_of_range(const RoundedActivations& a) {
  return static_cast<std::int64_t>(kMatMulScratchBytes) / bytes_of_part(a.part_columns);
}

inline std::int64_t int8_block_bytes(std::int64_t k, std::int64_t part) {
  return q4nx::ceil_div(k, part) * bytes_of_part(part);
}

// The range of `count` rows of 32 columns; for int8 weights the range of their type, so that no
// code changes.
inline ByteRange dense_range(const DenseWeight& weight, const float* columns, std::int64_t count) {
  if (weight.type == DataType::kInt8) {
    return range_of({_mm512_set1_ps(-128.0F), _mm512_set1_ps(-128.0F)},
                    {_mm512_set1_ps(127.0F), _mm512_set1_ps(127.0F)});
  }
  Rows lowest = load_rows(columns);
  Rows highest = lowest;
  __mmask16 lanes = without_nan(kAllLanes, lowest);
  for (std::int64_t i = 1; i < count; ++i) {
    const Rows row = load_rows(columns + i * kDenseColumns);
    lanes = without_nan(lanes, row);
    lowest = {_mm512_min_ps(lowest.even, row.even), _mm512_min_ps(lowest.odd, row.odd)};
    highest = {_mm512_max_ps(highest.even, row.even), _mm512_max_ps(highest.odd, row.odd)};
  }
  ByteRange range = range_of(lowest, highest);
  if (lanes != kAllLanes) {
    mark_nan(count, [&](std::int64_t i) { return load_rows(columns + i * kDenseColumns); }, range);
  }
  return range;
}

// Four rows of 16 columns as codes, one row in each byte of a lane. Values outside of the range are
// padding, whose activations are zero.
inline __m512i code_quad(const __m512 (&rows)[4], __m512 lowest, __m512 inverse) {
  __m512i codes = _mm512_setzero_si512();
  for (int i = 3; i >= 0; --i) {
    const __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_sub_ps(rows[i], lowest), inverse));
    const __m512i byte = _mm512_and_si512(code, _mm512_set1_epi32(0xff));
    codes = _mm512_or_si512(_mm512_slli_epi32(codes, 8), byte);
  }
  return codes;
}

inline void pack_int8(const DenseWeight& weight, std::int64_t block, std::int64_t part,
                      std::byte* packed) {
  alignas(64) float columns[kStoredPart * kDenseColumns];
  const std::int64_t part_bytes = part * kDenseColumns;
  const std::int64_t k_blocks = q4nx::ceil_div(weight.k, part);
  auto* parameters = reinterpret_cast<Parameters*>(packed + k_blocks * part_bytes);
  for (std::int64_t b = 0; b < k_blocks; ++b) {
    const std::int64_t k = b * part;
    const std::int64_t count = std::min(part, weight.k - k);
    widen_columns(weight, k, count, block, columns);
    std::fill(columns + count * kDenseColumns, columns + part * kDenseColumns, 0.0F);
    const ByteRange range = dense_range(weight, columns, count);
    // Codes are steps of the range / 255; byte_range's inverse is in 256ths of a step.
    const __m512 step = _mm512_set1_ps(1.0F / 256.0F);
    const Rows inverse{_mm512_mul_ps(range.inverse.even, step),
                       _mm512_mul_ps(range.inverse.odd, step)};
    std::byte* codes = packed + b * part_bytes;
    for (std::int64_t i = 0; i < count; i += 4, codes += 128) {
      __m512 even[4];
      __m512 odd[4];
      for (int j = 0; j < 4; ++j) {
        const Rows row = load_rows(columns + (i + j) * kDenseColumns);
        even[j] = row.even;
        odd[j] = row.odd;
      }
      const Rows& lowest = range.parameters.minimum;
      _mm512_store_si512(codes, code_quad(even, lowest.even, inverse.even));
      _mm512_store_si512(codes + 64, code_quad(odd, lowest.odd, inverse.odd));
    }
    // The rest of the last group, whose activations are zero.
    std::fill(codes, packed + b * part_bytes + q4nx::ceil_div(count, q4nx::kGroup) * 1024,
              std::byte{0});
    alignas(64) float scales[2 * kDenseColumns];
    store_rows(range.parameters.scale, scales);
    store_rows(range.parameters.minimum, scales + kDenseColumns);
    scale_columns(weight, 2, block, scales);
    parameters[b] = {load_rows(scales), load_rows(scales + kDenseColumns)};
  }
}

// Calls function(range, fetch) for ranges of packed columns that fill an L1 data cache. `fetch`
// fetches the next codes in memory in `steps` steps: those of more of k, or of the next columns.
template <typename Function>
void for_each_dense_range(const std::byte* packed, const RoundedActivations& a, std::int64_t steps,
                          const Function& function) {
  const std::int64_t part_groups = a.part_columns / q4nx::kGroup;
  const std::int64_t part_bytes = a.part_columns * kDenseColumns;
  const std::int64_t k_blocks = a.padded_k / a.part_columns;
  const std::int64_t most = parts_of_range(a);
  const auto* parameters = reinterpret_cast<const Parameters*>(packed + k_blocks * part_bytes);
  for (std::int64_t b = 0; b < k_blocks; b += most) {
    const std::int64_t blocks = std::min(most, k_blocks - b);
    const std::int64_t groups = std::min(blocks * part_groups, a.filled_groups - b * part_groups);
    const BytePartRange range{packed + b * part_bytes, parameters + b, b, blocks, groups};
    function(range, RangeFetch(range.codes + blocks * part_bytes, most * part_bytes, steps));
  }
}

// All 32 columns are one tile.
inline void dense_int8(const std::byte* packed, const RoundedActivations& a, std::int64_t first,
                       std::int64_t count, std::int64_t /*columns*/, float* out) {
  const std::int64_t steps = q4nx::ceil_div(count, kTile) * parts_of_range(a);
  for_each_dense_range(packed, a, steps, [&](const BytePartRange& range, RangeFetch fetch) {
    for (std::int64_t row = 0; row < count; row += kTile) {
      with_count<kTile>(std::min<std::int64_t>(kTile, count - row), [&]<int COUNT>() {
        tile_int8<COUNT>(range, a, first + row, fetch, out + row * kDenseColumns);
      });
    }
  });
}

// --- bf16 -------------------------------------------------------------------------------------

// 12 x 2 sums leave 8 of 32 registers for weights and activations.
constexpr int kBFloat16Rows = 12;
constexpr std::int64_t kPairBytes = 2 * 64;
// Groups of 32 of k whose packed columns are 32 KB, for L1 (the scratch of other products is as
// large).
constexpr std::int64_t kBFloat16Range = 32 * 1024 / (kPairBytes * q4nx::kGroup / 2);

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
// from the groups before, as in float.h.
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
  for (std::int64_t group = 0; group < a.filled_groups; group += kBFloat16Range) {
    const std::int64_t groups = std::min(kBFloat16Range, a.filled_groups - group);
    constexpr std::int64_t kPackedBytes = q4nx::kGroup / 2 * kPairBytes;
    RangeFetch fetch(packed + (group + groups) * kPackedBytes, kBFloat16Range * kPackedBytes,
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
