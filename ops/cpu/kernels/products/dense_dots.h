// SPDX-License-Identifier: Apache-2.0
// One row of activations times rows of a transposed dense weight in its stored order, in f32. It
// serves weights so narrow that packing takes longer than multiplying, such as a router's.
#pragma once

#include <algorithm>

#include "ops/cpu/kernels/products/dense_matmul_float.h"

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

inline void dense_dots(const DenseWeight& weight, const float* x, std::int64_t begin,
                       std::int64_t end, float* out) {
  with_weight_type(weight.type, [&]<typename Type>() {
    const auto* rows = static_cast<const typename Type::Element*>(weight.data);
    for (std::int64_t row = begin; row < end; row += kDotRows) {
      with_count<kDotRows>(std::min<std::int64_t>(kDotRows, end - row), [&]<int COUNT>() {
        dots_of<Type, COUNT>(x, rows + row * weight.k, weight.k, out + row);
      });
    }
  });
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
