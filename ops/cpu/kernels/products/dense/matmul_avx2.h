// SPDX-License-Identifier: Apache-2.0
// DenseMatMul in AVX2, in int8 without VNNI.
//
// VPMADDUBSW adds two products of an unsigned and a signed byte in 16 bits, saturating. Four such
// sums are added up in 16 bits before VPMADDWD widens them: 128 products take 4 + 3 + 2
// instructions, of which 5 compete for the two units of multiplication, where f32 takes 16. So a
// Zen 3 makes up to 51 products a cycle instead of 16 (measured: 39).
//
// Weights are the signed bytes: 32 columns x a part of k, w = scale * code, with a scale for each
// column of a part. Activations are the unsigned ones, x = lowest + scale * u. The product is scale
// * scale * dot(u, code) + lowest * (sum of the weights). The scale of a column is the least with
// which none of its sums passes 16 bits, whatever the activations are: most columns have no eight
// weights of one sign in a sum that are all near the largest.
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

// So many times four of k are added up in 16 bits. One Zen 3 core makes 97 GMAC/s with 1, 111 with
// 2, 128 with 4. More of them leave weights fewer bits: those of normally distributed ones have a
// relative error of 0.0129 with 1 and 0.0147 with 4.
constexpr int kQuadsOfSum = 4;
constexpr int kLargestSum = std::numeric_limits<std::int16_t>::max();
constexpr float kLargestCode = std::numeric_limits<std::int8_t>::max();
// The largest integers of activations: with 150, errors of activations and weights are alike for
// normally distributed ones. Those of int8 weights add up to 258 = 32767 / 127 then, which a
// column's sums pass by a fifth (MiniLM), so that its codes are rounded to a step of 1.2.
constexpr int kRoundedLargest = 150;
constexpr int kStoredLargest = 127;
// The most columns of a part. Adding up the results of a part takes as long as the dots of 60
// columns (47 GMAC/s with parts of 128, 64 of 256, 70 of 384, 74 of 1536, before sums of 16 bits),
// and a longer part costs bits. The dots of 384 columns, at most 384 x 255 x 128, are less than
// 2^24: exact in f32.
constexpr std::int64_t kRoundedPart = 256;
constexpr std::int64_t kStoredPart = 384;
// 4 x 2 sums of 16 bits, and as many of 32 of which some are in memory.
constexpr int kByteRows = 4;

inline DenseRounding int8_rounding(DataType weight) {
  if (weight == DataType::kInt8) return {DenseType::kInt8, kStoredLargest, kStoredPart, true};
  return {DenseType::kInt8, kRoundedLargest, kRoundedPart, true};
}

inline std::int64_t bytes_of_part(std::int64_t columns) {
  return kDenseColumns * (columns + 2 * static_cast<std::int64_t>(sizeof(float)));
}

inline std::int64_t int8_block_bytes(std::int64_t k, std::int64_t part) {
  return q4nx::ceil_div(k, part) * bytes_of_part(part);
}

// The scale of a vector of columns of `count` rows, NaN if one is NaN or infinite: the least with
// which neither a code passes 127 nor the codes of one sign in a sum, each rounded by up to half,
// pass 16 bits. Codes that are stored stay as they are if their sums do not pass.
inline Vector scale_of_columns(const float* from, std::int64_t count, bool is_stored) {
  const int most_codes = kLargestSum / (is_stored ? kStoredLargest : kRoundedLargest);
  const auto limit = static_cast<float>(most_codes);
  Vector largest{};
  Vector most{};
  Vector zero_or_nan{};
  for (std::int64_t start = 0; start < count; start += 4 * kQuadsOfSum) {
    // VPMADDUBSW keeps the first two of each four rows apart from the last two.
    Vector positive[2] = {};
    Vector negative[2] = {};
    for (std::int64_t i = start; i < std::min(start + 4 * kQuadsOfSum, count); ++i) {
      const Vector row = load(from + i * kDenseColumns);
      positive[i / 2 % 2] += max(row, Vector{});
      negative[i / 2 % 2] -= min(row, Vector{});
      largest = max(largest, magnitude(row));
      zero_or_nan += row * 0.0F;
    }
    for (const Vector sum : {positive[0], positive[1], negative[0], negative[1]})
      most = max(sum, most);
  }
  // Each of twice kQuadsOfSum codes is rounded by half at most.
  const Vector scale =
      max(most * broadcast(1 / (limit - kQuadsOfSum)), largest * broadcast(1 / kLargestCode)) +
      zero_or_nan;
  return is_stored ? select(most > limit, scale, broadcast(1.0F)) : scale;
}

// Codes, scales and sums of `count` rows columns[][32], after which zeros fill a group.
inline void pack_part(const float* columns, std::int64_t count, bool is_stored, std::byte* packed,
                      float* parameters) {
  const std::int64_t quads = q4nx::ceil_div(count, q4nx::kGroup) * q4nx::kGroup / 4;
  for (int v = 0; v < kDenseColumns / kLanes; ++v) {
    const float* from = columns + v * kLanes;
    const Vector scale = scale_of_columns(from, count, is_stored);
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
  for (std::int64_t quad = 0; quad < quads; quad += kQuadsOfSum) {
    __m256i sum[COUNT][kColumnVectors];
    // Unrolled, or GCC keeps the sums in memory.
#pragma GCC unroll 4
    for (int i = 0; i < kQuadsOfSum; ++i, codes += 4 * kDenseColumns, x += 4) {
#pragma GCC unroll 2
      for (int v = 0; v < kColumnVectors; ++v) {
        const __m256i column = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + v * 32));
#pragma GCC unroll 4
        for (int r = 0; r < COUNT; ++r) {
          std::int32_t four;
          std::memcpy(&four, x + r * x_stride, sizeof(four));
          __m256i two = _mm256_maddubs_epi16(_mm256_set1_epi32(four), column);
          if (i > 0) two = _mm256_add_epi16(sum[r][v], two);
          // Keeps GCC from reordering the additions, whose operands would not fit 16 registers.
          asm("" : "+x"(two));
          sum[r][v] = two;
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < COUNT; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kColumnVectors; ++v)
        dot[r][v] = _mm256_add_epi32(dot[r][v], _mm256_madd_epi16(sum[r][v], ones));
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
                       std::int64_t count, std::int64_t columns, float* out) {
  const std::int64_t parts = a.padded_k / a.part_columns;
  for (std::int64_t part = 0; part < parts; ++part, packed += bytes_of_part(a.part_columns)) {
    for (std::int64_t row = 0; row < count; row += kByteRows) {
      with_count<kByteRows>(std::min<std::int64_t>(kByteRows, count - row), [&]<int COUNT>() {
        for (std::int64_t c = 0; c < columns; c += kTileColumns)
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
