// SPDX-License-Identifier: Apache-2.0
// DenseMatMul in f32, with any instruction set: used if there are no dot products of bf16 or int8,
// and for products of few rows, for which rounding a weight does not pay.
//
// Packed: [k][32 columns] f32. Dataflow, for each range of k whose columns fill the L1 data cache:
// tiles of kFloatRows rows of activations by two vectors of columns. Registers accumulate a tile,
// which is added to `out` after each range. Sums over some hundred of k, added up, have a smaller
// error than one running sum over a long k.
#pragma once

#include <algorithm>
#include <cstring>

#include "ops/cpu/kernels.h"
#include "ops/cpu/kernels/vector.h"
#include "ops/cpu/kernels/with_count.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// Calls function.template operator()<Type>() with the weight's type.
template <typename Function>
void with_weight_type(DataType type, const Function& function) {
  switch (type) {
    case DataType::kBFloat16:
      return function.template operator()<BFloat16>();
    case DataType::kFloat16:
      return function.template operator()<Half>();
    case DataType::kInt8:
      return function.template operator()<Int8>();
    default:
      return function.template operator()<Float>();
  }
}

// How many rows ahead are prefetched: 16 lines are on their way at a time. Other distances were not
// tried.
constexpr std::int64_t kRowsAhead = 16;

// Rows k .. k + count of columns 32 * block .. as out[count][32], without the scales; zero past the
// weight's last column.
inline void widen_columns(const DenseWeight& weight, std::int64_t k, std::int64_t count,
                          std::int64_t block, float* out) {
  if (count == 0) return;  // with K = 0 there may be no memory
  const std::int64_t column = block * kDenseColumns;
  const std::int64_t columns = std::min(kDenseColumns, weight.m - column);
  if (columns < kDenseColumns)
    std::memset(out, 0, static_cast<std::size_t>(count * kDenseColumns) * sizeof(float));
  with_weight_type(weight.type, [&]<typename Type>() {
    const auto* data = static_cast<const typename Type::Element*>(weight.data);
    if (weight.transposed) {
      for (std::int64_t c = 0; c < columns; ++c) {
        const auto* from = data + (column + c) * weight.k + k;
        for (std::int64_t i = 0; i < count; ++i)
          out[i * kDenseColumns + c] = Type::load_one(from + i);
      }
      return;
    }
    for (std::int64_t i = 0; i < count; ++i, out += kDenseColumns) {
      const auto* from = data + (k + i) * weight.m + column;
      // Each row of a wide weight begins in another page, and hardware does not fetch ahead across
      // pages.
      __builtin_prefetch(from + kRowsAhead * weight.m);
      std::int64_t c = 0;
      for (; c + kLanes <= columns; c += kLanes) store(out + c, Type::load_vector(from + c));
      for (; c < columns; ++c) out[c] = Type::load_one(from + c);
    }
  });
}

// Multiplies `count` rows of 32 columns by the weight's scales, if it has any.
inline void scale_columns(const DenseWeight& weight, std::int64_t count, std::int64_t block,
                          float* out) {
  if (weight.scales == nullptr) return;
  const std::int64_t column = block * kDenseColumns;
  float scales[kDenseColumns] = {};
  std::copy_n(weight.scales + column, std::min(kDenseColumns, weight.m - column), scales);
  for (std::int64_t i = 0; i < count; ++i, out += kDenseColumns) {
    for (int c = 0; c < kDenseColumns; c += kLanes)
      store(out + c, load(out + c) * load(scales + c));
  }
}

// Rows of a tile: with two vectors of columns, accumulators take 24 of 32 registers (AVX-512 and
// NEON), or 12 of 16.
constexpr int kFloatRows = kRegisters == 32 ? 12 : 6;
constexpr int kColumnVectors = 2;
constexpr std::int64_t kTileColumns = static_cast<std::int64_t>(kColumnVectors) * kLanes;
// 32 KB of packed columns.
constexpr std::int64_t kFloatRange = 256;

// Where columns lie: packed for this tile, or in the rows of a weight as it is stored.
enum class Columns : std::uint8_t { kPacked, kStored };

// COUNT rows x[x_stride] of activations times `k` rows of VECTORS vectors of columns, whose rows
// are `stride` elements apart: out = product, or out += product if `adds`.
template <typename Type, int COUNT, int VECTORS, Columns PLACE>
void tile_dense(const typename Type::Element* columns, std::int64_t stride, std::int64_t k,
                const float* x, std::int64_t x_stride, bool adds, float* out) {
  Vector sum[COUNT][VECTORS];
  for (int r = 0; r < COUNT; ++r) {
    for (int v = 0; v < VECTORS; ++v) sum[r][v] = Vector{};
  }
  for (std::int64_t i = 0; i < k; ++i, columns += stride) {
    // Each row of a wide weight begins in another page, and hardware does not fetch ahead across
    // pages.
    if constexpr (PLACE == Columns::kStored) __builtin_prefetch(columns + kRowsAhead * stride);
    Vector row[VECTORS];
    for (int v = 0; v < VECTORS; ++v) row[v] = Type::load_vector(columns + v * kLanes);
    for (int r = 0; r < COUNT; ++r) {
      const Vector activation = broadcast(x[r * x_stride + i]);
      for (int v = 0; v < VECTORS; ++v) sum[r][v] += activation * row[v];
    }
  }
  // Unrolled, or GCC keeps the sums in memory.
#pragma GCC unroll 12
  for (int r = 0; r < COUNT; ++r) {
    for (int v = 0; v < VECTORS; ++v) {
      float* y = out + r * kDenseColumns + v * kLanes;
      store(y, adds ? load(y) + sum[r][v] : sum[r][v]);
    }
  }
}

inline void dense_float(const std::byte* packed, const RoundedActivations& a, std::int64_t first,
                        std::int64_t count, std::int64_t columns, float* out) {
  const auto* weight = reinterpret_cast<const float*>(packed);
  const auto* x = static_cast<const float*>(a.values) + first * a.padded_k;
  for (std::int64_t k = 0; k < a.padded_k; k += kFloatRange) {
    const std::int64_t end = std::min(k + kFloatRange, a.padded_k);
    for (std::int64_t row = 0; row < count; row += kFloatRows) {
      with_count<kFloatRows>(std::min<std::int64_t>(kFloatRows, count - row), [&]<int COUNT>() {
        for (std::int64_t c = 0; c < columns; c += kTileColumns) {
          tile_dense<Float, COUNT, kColumnVectors, Columns::kPacked>(
              weight + k * kDenseColumns + c, kDenseColumns, end - k, x + row * a.padded_k + k,
              a.padded_k, k > 0, out + row * kDenseColumns + c);
        }
      });
    }
  }
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
