// SPDX-License-Identifier: Apache-2.0
// DenseMatMul in AVX2, in int8 without VNNI.
//
// VPMADDUBSW adds two products of an unsigned and a signed byte in 16 bits, saturating: 7 bits
// times 8 are never more than 2 x 127 x 127 < 2^15. So 32 columns x 128 of k get one scale and one
// minimum a column, w = minimum + scale * u with u in 0 .. 127 and scale = (range of the 128
// weights) / 127. Three instructions make 32 products, where f32 takes four, and two of the three
// compete for the units of multiplication: twice as many products a cycle. A weight that is int8 is
// u less 128 with u in 0 .. 255, exactly, and activations have 7 bits: at most 2 x 255 x 63.
//
// Packed: for each 128 of k codes [k / 4][32 columns][4 of k] and then scales and minima f32 [32]
// each. Dataflow: tiles of kByteRows rows of activations by two vectors of columns; the dots of 128
// of k, in registers, times both scales, plus minimum times the activations' sum, into `out`.
#pragma once

#include <algorithm>

#include "ops/cpu/kernels/products/dense/float.h"
#include "ops/formats/q4nx.h"

// A tool that reads this header by itself may have the options of another instruction set.
#if defined(__AVX2__) && !defined(__AVX512F__)
namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// 4 x 2 dots leave 8 of 16 registers for codes, activations, ones and products.
constexpr int kByteRows = 4;
constexpr std::int64_t kDenseGroups = kDensePart / q4nx::kGroup;
constexpr std::int64_t kCodeBytes = kDensePart * kDenseColumns;
constexpr std::int64_t kBytePart =
    kCodeBytes + 2 * kDenseColumns * static_cast<std::int64_t>(sizeof(float));

inline std::int64_t int8_block_bytes(std::int64_t k) {
  return q4nx::ceil_div(k, kDensePart) * kBytePart;
}

// Codes of four rows of a vector of columns, one row in each byte of a lane; NaN gives any code.
inline Integers code_quad(const float* rows, Vector lowest, Vector inverse) {
  Integers codes{};
  for (int i = 3; i >= 0; --i) {
    const Vector code = (load(rows + i * kDenseColumns) - lowest) * inverse;
    codes = (codes << 8) | (reinterpret_cast<Integers>(_mm256_cvtps_epi32(code)) & 0xff);
  }
  return codes;
}

// Codes, scales and minima of `count` rows columns[128][32], of which those past `count` are zero,
// as are their activations. A column with NaN or infinity gets the scale NaN.
inline void pack_part(const float* columns, std::int64_t count, bool is_int8, std::byte* packed) {
  auto* parameters = reinterpret_cast<float*>(packed + kCodeBytes);
  const std::int64_t quads = q4nx::ceil_div(count, q4nx::kGroup) * q4nx::kGroup / 4;
  for (int v = 0; v < kDenseColumns / kLanes; ++v) {
    const float* from = columns + v * kLanes;
    Vector lowest = load(from);
    Vector highest = lowest;
    Vector zero_or_nan{};
    for (std::int64_t i = 0; i < count; ++i) {
      const Vector row = load(from + i * kDenseColumns);
      lowest = _mm256_min_ps(row, lowest);
      highest = _mm256_max_ps(row, highest);
      zero_or_nan += row * 0.0F;
    }
    if (is_int8) {
      lowest = broadcast(-128.0F);
      highest = broadcast(127.0F);
    }
    const float largest_code = is_int8 ? 255.0F : 127.0F;
    const Vector range = highest - lowest;
    const Vector inverse = range > 0.0F ? largest_code / range : Vector{};
    for (std::int64_t quad = 0; quad < quads; ++quad) {
      const Integers codes = code_quad(from + quad * 4 * kDenseColumns, lowest, inverse);
      std::memcpy(packed + (quad * kDenseColumns + v * kLanes) * 4, &codes, sizeof(codes));
    }
    store(parameters + v * kLanes, range * (1 / largest_code) + zero_or_nan);
    store(parameters + kDenseColumns + v * kLanes, lowest);
  }
}

inline void pack_int8(const DenseWeight& weight, std::int64_t block, std::byte* packed) {
  alignas(64) float columns[kDensePart * kDenseColumns];
  for (std::int64_t k = 0; k < weight.k; k += kDensePart, packed += kBytePart) {
    const std::int64_t count = std::min(kDensePart, weight.k - k);
    widen_columns(weight, k, count, block, columns);
    std::fill(columns + count * kDenseColumns, std::end(columns), 0.0F);
    pack_part(columns, count, weight.type == DataType::kInt8, packed);
    scale_columns(weight, 2, block, reinterpret_cast<float*>(packed + kCodeBytes));
  }
}

// The dots of COUNT rows of activations with `quads` times four of k of two vectors of columns: at
// most 128 x 255 x 127, far from 2^31.
template <int COUNT>
void dot_part(const std::byte* codes, std::int64_t quads, const std::int8_t* x,
              std::int64_t x_stride, __m256i (&dot)[COUNT][kColumnVectors]) {
  const __m256i ones = _mm256_set1_epi16(1);
  for (std::int64_t quad = 0; quad < quads; ++quad, codes += 4 * kDenseColumns, x += 4) {
    __m256i column[kColumnVectors];
    for (int v = 0; v < kColumnVectors; ++v)
      column[v] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + v * 32));
    for (int r = 0; r < COUNT; ++r) {
      std::int32_t four;
      std::memcpy(&four, x + r * x_stride, sizeof(four));
      const __m256i activations = _mm256_set1_epi32(four);
      for (int v = 0; v < kColumnVectors; ++v) {
        const __m256i pairs = _mm256_maddubs_epi16(column[v], activations);
        dot[r][v] = _mm256_add_epi32(dot[r][v], _mm256_madd_epi16(pairs, ones));
      }
    }
  }
}

// COUNT rows of activations from `row` on times part `part` of two vectors of columns from `column`
// on, added to what is in `out` from the parts before.
template <int COUNT>
void tile_int8(const std::byte* packed, const RoundedActivations& a, std::int64_t row,
               std::int64_t part, std::int64_t column, float* out) {
  const auto* x = static_cast<const std::int8_t*>(a.values) + row * a.padded_k + part * kDensePart;
  const std::int64_t groups = std::min(kDenseGroups, a.filled_groups - part * kDenseGroups);
  __m256i dot[COUNT][kColumnVectors] = {};
  dot_part<COUNT>(packed + column * 4, groups * q4nx::kGroup / 4, x, a.padded_k, dot);
  const auto* parameters = reinterpret_cast<const float*>(packed + kCodeBytes) + column;
  const std::int64_t parts = a.padded_k / kDensePart;
  for (int r = 0; r < COUNT; ++r) {
    const std::int64_t at = (row + r) * parts + part;
    for (int v = 0; v < kColumnVectors; ++v) {
      float* y = out + r * kDenseColumns + column + v * kLanes;
      const Vector scale = load(parameters + v * kLanes) * a.scales[at];
      const Vector minimum = load(parameters + kDenseColumns + v * kLanes) * a.sums[at];
      const Vector before = part == 0 ? Vector{} : load(y);
      store(y, before + Vector(_mm256_cvtepi32_ps(dot[r][v])) * scale + minimum);
    }
  }
}

inline void dense_int8(const std::byte* packed, const RoundedActivations& a, std::int64_t first,
                       std::int64_t count, float* out) {
  const std::int64_t parts = a.padded_k / kDensePart;
  for (std::int64_t part = 0; part < parts; ++part, packed += kBytePart) {
    for (std::int64_t row = 0; row < count; row += kByteRows) {
      with_count<kByteRows>(std::min<std::int64_t>(kByteRows, count - row), [&]<int COUNT>() {
        for (std::int64_t c = 0; c < kDenseColumns; c += kTileColumns)
          tile_int8<COUNT>(packed, a, first + row, part, c, out + row * kDenseColumns);
      });
    }
  }
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
#endif
