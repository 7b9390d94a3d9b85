// SPDX-License-Identifier: Apache-2.0
// Stores 32 columns of a product: adds the bias, applies the activation, adds the residual.
#include <algorithm>
#include <cstdint>

#include "ops/cpu/kernels/functions.h"
#include "ops/cpu/kernels/tables.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// Stores without first reading the line into a cache; y is aligned to a vector's size.
inline void store_past_caches(float* y, Vector v) {
#if defined(__AVX512F__)
  _mm512_stream_ps(y, v);
#elif defined(__AVX2__)
  _mm256_stream_ps(y, v);
#else
  store(y, v);
#endif
}

// Makes these stores visible to other threads before all later stores.
inline void finish_streams() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

// One row of 32 columns, of which the first `columns` are y's.
template <Function ACTIVATION, bool STREAMED>
void finish_row(const float* product, std::int64_t columns, const float* bias,
                const float* residual, float* y) {
  for (std::int64_t i = 0; i < columns; i += kLanes) {
    const std::int64_t count = std::min<std::int64_t>(kLanes, columns - i);
    Vector value = load(product + i);
    if (bias != nullptr) value += load_some(bias + i, count);
    value = apply<ACTIVATION>(value);
    if (residual != nullptr) value += load_some(residual + i, count);
    if constexpr (STREAMED) {
      store_past_caches(y + i, value);
    } else {
      store_some(y + i, value, count);
    }
  }
}

// Row by row, all blocks of a row one after the other, because memory takes neighbouring stores
// faster.
void finish_product(const float* product, std::int64_t blocks, std::int64_t first,
                    std::int64_t count, std::int64_t column, const ProductEpilogue& e) {
  const auto finish = [&]<Function ACTIVATION, bool STREAMED>() {
    for (std::int64_t row = 0; row < count; ++row) {
      for (std::int64_t block = 0; block < blocks; ++block) {
        const std::int64_t from = column + block * kDenseColumns;
        const std::int64_t at = (first + row) * e.m + from;
        finish_row<ACTIVATION, STREAMED>(
            product + (block * count + row) * kDenseColumns, std::min(kDenseColumns, e.m - from),
            e.bias == nullptr ? nullptr : e.bias + from,
            e.residual == nullptr ? nullptr : e.residual + at, e.y + at);
      }
    }
  };
  // Stores past the caches take whole vectors at addresses that are multiples of their size.
  const bool whole =
      e.m % kLanes == 0 && reinterpret_cast<std::uintptr_t>(e.y) % sizeof(Vector) == 0;
  const auto finish_as = [&]<Function ACTIVATION>() {
    if (e.streamed && whole) {
      finish.template operator()<ACTIVATION, true>();
      finish_streams();
    } else {
      finish.template operator()<ACTIVATION, false>();
    }
  };
  if (e.activation == Function::kGelu) return finish_as.template operator()<Function::kGelu>();
  if (e.activation == Function::kGeluTanh)
    return finish_as.template operator()<Function::kGeluTanh>();
  finish_as.template operator()<Function::kNone>();
}

}  // namespace

void fill_product_epilogue(Kernels& kernels) { kernels.finish_product = finish_product; }

}  // namespace flownpu::cpu::FLOWNPU_ISA
