// SPDX-License-Identifier: Apache-2.0
// DenseMatMul in AVX2, in int8 without VNNI.
//
// VPMADDUBSW adds two products of an unsigned and a signed byte in 16 bits, saturating. Three
// instructions make 32 products, where f32 takes four, and two of the three compete for the units
// of multiplication: twice as many products a cycle.
//
// Weights are the signed bytes: 32 columns x a part of k, w = scale * code, with a scale for each
// column of a part; a weight that is int8 is its code. Activations are the unsigned ones, x =
// lowest + scale * u. The product is scale * scale * dot(u, code) + lowest * (sum of the weights).
// No two products may pass 16 bits: 2 x 90 x 182 < 2^15, which shares the error fairly between
// weights and activations; for int8 weights the largest u follows from them (127 or more).
//
// Packed: for each part of k codes [k / 4][32 columns][4 of k], then scales and sums of the
// weights, f32 [32] each. Dataflow: tiles of kByteRows rows of activations by two vectors of
// columns; the dots of a part, in registers, times both scales, plus the sum times the lowest
// activation, into `out`.
#pragma once

#include <algorithm>
#include <limits>

#include "ops/cpu/kernels/products/dense/float.h"
#include "ops/cpu/kernels/products/rounding.h"
#include "ops/formats/q4nx.h"

// A tool that reads this header by itself may have the options of another instruction set.
#if defined(__AVX2__) && !defined(__AVX512F__)
namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

constexpr float kLargestCode = 90.0F;
// The most columns of a part. Adding up the results of a part takes as long as the dots of 60
// columns (47 GMAC/s with parts of 128, 64 of 256, 70 of 384, 74 of 1536), and a longer part costs
// bits; int8 weights lose none, and leave more of them to the activations. The dots of 384 columns,
// at most 384 x 255 x 128, are less than 2^24: exact in f32.
constexpr std::int64_t kRoundedPart = 256;
constexpr std::int64_t kStoredPart = 384;
// 4 x 2 dots leave 8 of 16 registers for codes, activations, ones and products.
constexpr int kByteRows = 4;

inline DenseRounding int8_rounding(DataType weight) {
  // 127 until int8 weights are known: two of them are -256 at the least.
  if (weight == DataType::kInt8) return {DenseType::kInt8, 127, kStoredPart, true};
  return {DenseType::kInt8, 182, kRoundedPart, true};
}

inline std::int64_t bytes_of_part(std::int64_t columns) {
  return kDenseColumns * (columns + 2 * static_cast<std::int64_t>(sizeof(float)));
}

inline std::int64_t int8_block_bytes(std::int64_t k, std::int64_t part) {
  return q4nx::ceil_div(k, part) * bytes_of_part(part);
}

// The largest magnitude of `count` rows of a vector of columns; NaN if one is NaN or infinite.
inline Vector largest_of_columns(const float* from, std::int64_t count) {
  Vector largest{};
  Vector zero_or_nan{};
  for (std::int64_t i = 0; i < count; ++i) {
    const Vector row = load(from + i * kDenseColumns);
    largest = larger_magnitude(largest, magnitude(row));
    zero_or_nan += row * 0.0F;
  }
  return largest + zero_or_nan;
}

// Codes, scales and sums of `count` rows columns[][32], after which zeros fill a group.
inline void pack_part(const float* columns, std::int64_t count, bool is_stored, std::byte* packed,
                      float* parameters) {
  const std::int64_t quads = q4nx::ceil_div(count, q4nx::kGroup) * q4nx::kGroup / 4;
  for (int v = 0; v < kDenseColumns / kLanes; ++v) {
    const float* from = columns + v * kLanes;
    const Vector scale =
        is_stored ? broadcast(1.0F) : largest_of_columns(from, count) * broadcast(1 / kLargestCode);
    // The codes of a column of NaN may be any.
    const Vector inverse = scale > 0.0F ? 1.0F / scale : Vector{};
    Integers sum{};
    for (std::int64_t quad = 0; quad < quads; ++quad) {
      Integers codes{};
      for (int i = 3; i >= 0; --i) {
        const Vector code = load(from + (quad * 4 + i) * kDenseColumns) * inverse;
        const auto integer = reinterpret_cast<Integers>(_mm256_cvtps_epi32(code));
        sum += integer;
        codes = (codes << 8) | (integer & 0xff);
      }
      std::memcpy(packed + (quad * kDenseColumns + v * kLanes) * 4, &codes, sizeof(codes));
    }
    store(parameters + v * kLanes, scale);
    store(parameters + kDenseColumns + v * kLanes, __builtin_convertvector(sum, Vector) * scale);
  }
}

inline void pack_int8(const DenseWeight& weight, std::int64_t block, std::int64_t part,
                      std::byte* packed) {
  alignas(64) float columns[kStoredPart * kDenseColumns];
  for (std::int64_t k = 0; k < weight.k; k += part, packed += bytes_of_part(part)) {
    const std::int64_t count = std::min(part, weight.k - k);
    widen_columns(weight, k, count, block, columns);
    std::fill(columns + count * kDenseColumns, columns + part * kDenseColumns, 0.0F);
    auto* parameters = reinterpret_cast<float*>(packed + part * kDenseColumns);
    pack_part(columns, count, weight.type == DataType::kInt8, packed, parameters);
    scale_columns(weight, 2, block, parameters);
  }
}

// The dots of COUNT rows of activations with `quads` times four of k of two vectors of columns.
template <int COUNT>
void dot_part(const std::byte* codes, std::int64_t quads, const std::uint8_t* x,
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
        const __m256i pairs = _mm256_maddubs_epi16(activations, column[v]);
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
  const auto* x =
      static_cast<const std::uint8_t*>(a.values) + row * a.padded_k + part * a.part_columns;
  const std::int64_t part_groups = a.part_columns / q4nx::kGroup;
  const std::int64_t groups = std::min(part_groups, a.filled_groups - part * part_groups);
  __m256i dot[COUNT][kColumnVectors] = {};
  dot_part<COUNT>(packed + column * 4, groups * q4nx::kGroup / 4, x, a.padded_k, dot);
  const auto* parameters =
      reinterpret_cast<const float*>(packed + a.part_columns * kDenseColumns) + column;
  const std::int64_t parts = a.padded_k / a.part_columns;
  for (int r = 0; r < COUNT; ++r) {
    const std::int64_t at = (row + r) * parts + part;
    for (int v = 0; v < kColumnVectors; ++v) {
      float* y = out + r * kDenseColumns + column + v * kLanes;
      const Vector scale = load(parameters + v * kLanes) * a.scales[at];
      const Vector lowest = load(parameters + kDenseColumns + v * kLanes) * a.sums[at];
      const Vector before = part == 0 ? Vector{} : load(y);
      store(y, before + Vector(_mm256_cvtepi32_ps(dot[r][v])) * scale + lowest);
    }
  }
}

inline void dense_int8(const std::byte* packed, const RoundedActivations& a, std::int64_t first,
                       std::int64_t count, float* out) {
  const std::int64_t parts = a.padded_k / a.part_columns;
  for (std::int64_t part = 0; part < parts; ++part, packed += bytes_of_part(a.part_columns)) {
    for (std::int64_t row = 0; row < count; row += kByteRows) {
      with_count<kByteRows>(std::min<std::int64_t>(kByteRows, count - row), [&]<int COUNT>() {
        for (std::int64_t c = 0; c < kDenseColumns; c += kTileColumns)
          tile_int8<COUNT>(packed, a, first + row, part, c, out + row * kDenseColumns);
      });
    }
  }
}

// The extent of a part of activations. NaN, and a range past the largest f32, make the scale NaN.
struct ActivationRange {
  float lowest;
  float scale;
  float inverse;
};

inline ActivationRange activation_range(const float* x, std::int64_t start, std::int64_t columns,
                                        std::int64_t k, int largest) {
  // A vector of each place in a group, so that no instruction waits for the one before.
  Group lowest;
  Group highest;
  Group zero_or_nan{};
  for (int v = 0; v < Group::kVectors; ++v) lowest.part[v] = highest.part[v] = broadcast(x[start]);
  for (std::int64_t at = start; at < std::min(start + columns, k); at += q4nx::kGroup) {
    const Group group = load_group(x, at, k);
    for (int v = 0; v < Group::kVectors; ++v) {
      lowest.part[v] = _mm256_min_ps(group.part[v], lowest.part[v]);
      highest.part[v] = _mm256_max_ps(group.part[v], highest.part[v]);
      zero_or_nan.part[v] += group.part[v] * 0.0F;
    }
  }
  for (int v = 1; v < Group::kVectors; ++v) {
    lowest.part[0] = _mm256_min_ps(lowest.part[v], lowest.part[0]);
    highest.part[0] = _mm256_max_ps(highest.part[v], highest.part[0]);
    zero_or_nan.part[0] += zero_or_nan.part[v];
  }
  const float low = -reduce_max(-lowest.part[0]);
  const float range = reduce_max(highest.part[0]) - low;
  // The inverse of a smaller range would be infinite; such columns count as their lowest.
  constexpr float kNegligible = 255 / std::numeric_limits<float>::max();
  const auto steps = static_cast<float>(largest);
  return {low, range / steps + range * 0.0F + reduce_add(zero_or_nan.part[0]),
          range > kNegligible ? steps / range : 0.0F};
}

inline void round_to_unsigned(const float* x, std::int64_t k, std::int64_t padded_k,
                              std::int64_t part_columns, int largest, void* values, float* scales,
                              float* lowest) {
  auto* out = static_cast<std::int8_t*>(values);
  for (std::int64_t start = 0; start < padded_k; start += part_columns) {
    const ActivationRange range = activation_range(x, start, part_columns, k, largest);
    // Past the end of a row are zeros, whose integers are beside weights of zero.
    for (std::int64_t at = start; at < start + part_columns; at += q4nx::kGroup) {
      const Group group = load_group(x, at, k);
      Integers integers[Group::kVectors];
      for (int v = 0; v < Group::kVectors; ++v) {
        const Vector rounded = (group.part[v] - range.lowest) * range.inverse;
        integers[v] = reinterpret_cast<Integers>(_mm256_cvtps_epi32(rounded));
      }
      store_group<false>(out, integers);
      out += q4nx::kGroup;
    }
    *scales++ = range.scale;
    *lowest++ = range.lowest;
  }
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
#endif
