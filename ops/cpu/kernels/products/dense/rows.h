// SPDX-License-Identifier: Apache-2.0
// A few rows of activations times a dense weight in its stored order, in f32. It serves products
// for which packing takes longer than multiplying, and routers.
//
// Dataflow: a transposed weight, whose columns of W lie in one piece each, by dot products along k,
// four columns at a time. Else, for each 32 columns, tiles of all of them by a few rows, whose sums
// are in registers (float.h).
#pragma once

#include <algorithm>

#include "ops/cpu/kernels/products/dense/float.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// Columns whose products are added up in f32. Sums of such ranges are added up in double. So a
// product goes through no more than kDotRange / kLanes + kLanes additions in f32.
constexpr std::int64_t kDotRange = 2048;
// Rows of the weight that a vector of activations is multiplied by: enough chains of fused
// multiply-adds to hide their latency of 4 cycles.
constexpr int kDotRows = 4;

template <typename Type, int COUNT>
void dots_of(const float* x, const typename Type::Element* rows, std::int64_t k, float* out) {
  double total[COUNT] = {};
  for (std::int64_t start = 0; start < k; start += kDotRange) {
    const std::int64_t end = std::min(start + kDotRange, k);
    Vector sum[COUNT];
    for (int r = 0; r < COUNT; ++r) sum[r] = Vector{};
    std::int64_t i = start;
    for (; i + kLanes <= end; i += kLanes) {
      const Vector activations = load(x + i);
      for (int r = 0; r < COUNT; ++r) sum[r] += activations * Type::load_vector(rows + r * k + i);
    }
    for (int r = 0; r < COUNT; ++r) {
      float dot = reduce_add(sum[r]);
      for (std::int64_t j = i; j < end; ++j) dot += x[j] * Type::load_one(rows + r * k + j);
      total[r] += dot;
    }
  }
  for (int r = 0; r < COUNT; ++r) out[r] = static_cast<float>(total[r]);
}

// The r-th row's element of column `c`, counted from the first, in [32 columns][count][32].
inline float* in_blocks(float* out, std::int64_t count, std::int64_t r, std::int64_t c) {
  return out + (c / kDenseColumns * count + r) * kDenseColumns + c % kDenseColumns;
}

template <typename Type>
void transposed_rows(const DenseWeight& weight, const float* x, std::int64_t count,
                     std::int64_t begin, std::int64_t end, float* out) {
  const auto* data = static_cast<const typename Type::Element*>(weight.data);
  for (std::int64_t c = begin; c < end; c += kDotRows) {
    with_count<kDotRows>(std::min<std::int64_t>(kDotRows, end - c), [&]<int COUNT>() {
      for (std::int64_t r = 0; r < count; ++r) {
        float* dots = in_blocks(out, count, r, c - begin);
        dots_of<Type, COUNT>(x + r * weight.k, data + c * weight.k, weight.k, dots);
      }
    });
  }
}

// Rows of a tile of 32 columns: sums take half of the registers.
constexpr int kRowsOfTile = kRegisters / 2 * kLanes / kDenseColumns;

template <typename Type>
void rows_of_columns(const DenseWeight& weight, const float* x, std::int64_t count,
                     std::int64_t begin, std::int64_t end, float* out) {
  alignas(64) float widened[kFloatRange * kDenseColumns];
  const auto* data = static_cast<const typename Type::Element*>(weight.data);
  for (std::int64_t c = begin; c < end; c += kDenseColumns) {
    float* block = in_blocks(out, count, 0, c - begin);
    const std::int64_t columns = std::min(kDenseColumns, weight.m - c);
    const bool is_whole = columns % kLanes == 0;
    for (std::int64_t k = 0; k < weight.k; k += kFloatRange) {
      const std::int64_t stop = std::min(k + kFloatRange, weight.k);
      // A vector would pass the end of the last row.
      if (!is_whole) widen_columns(weight, k, stop - k, c / kDenseColumns, widened);
      for (std::int64_t r = 0; r < count; r += kRowsOfTile) {
        with_count<kRowsOfTile>(std::min<std::int64_t>(kRowsOfTile, count - r), [&]<int COUNT>() {
          constexpr int kVectors = kDenseColumns / kLanes;
          float* sums = block + r * kDenseColumns;
          const float* from = x + r * weight.k + k;
          if (is_whole) {
            with_count<kVectors>(columns / kLanes, [&]<int VECTORS>() {
              tile_dense<Type, COUNT, VECTORS, Columns::kStored>(
                  data + k * weight.m + c, weight.m, stop - k, from, weight.k, k > 0, sums);
            });
          } else {
            tile_dense<Float, COUNT, kVectors, Columns::kPacked>(widened, kDenseColumns, stop - k,
                                                                 from, weight.k, k > 0, sums);
          }
        });
      }
    }
  }
}

inline void dense_rows(const DenseWeight& weight, const float* x, std::int64_t count,
                       std::int64_t begin, std::int64_t end, float* out) {
  with_weight_type(weight.type, [&]<typename Type>() {
    if (weight.transposed) return transposed_rows<Type>(weight, x, count, begin, end, out);
    rows_of_columns<Type>(weight, x, count, begin, end, out);
  });
  if (weight.scales == nullptr) return;
  for (std::int64_t c = begin; c < end; ++c) {
    for (std::int64_t r = 0; r < count; ++r)
      *in_blocks(out, count, r, c - begin) *= weight.scales[c];
  }
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
