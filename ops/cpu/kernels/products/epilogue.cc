// SPDX-License-Identifier: Apache-2.0
// Stores 32 columns of a product: adds the bias, applies the activation, adds the residual.
#include <algorithm>
#include <cstdint>
#include <cstring>

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
  const auto finish = [&](std::int64_t i, std::int64_t count) __attribute__((always_inline)) {
    Vector value = load(product + i);
    if (bias != nullptr) value += load_some(bias + i, count);
    value = apply<ACTIVATION>(value);
    if (residual != nullptr) value += load_some(residual + i, count);
    if constexpr (STREAMED) {
      store_past_caches(y + i, value);
    } else {
      store_some(y + i, value, count);
    }
  };
  // Without branches between them, so that the vectors' long chains of an activation overlap.
  if (columns == kDenseColumns) {
#pragma GCC unroll 8
    for (int i = 0; i < static_cast<int>(kDenseColumns); i += kLanes) finish(i, kLanes);
    return;
  }
  for (std::int64_t i = 0; i < columns; i += kLanes)
    finish(i, std::min<std::int64_t>(kLanes, columns - i));
}

// Four rows of four columns, transposed: to[column][row].
void transpose_square(const float* from, float* to, std::int64_t to_stride) {
  typedef float Four __attribute__((vector_size(16)));
  Four x[4];
  for (int i = 0; i < 4; ++i) std::memcpy(&x[i], from + i * kDenseColumns, sizeof(Four));
  const Four low0 = __builtin_shufflevector(x[0], x[1], 0, 4, 1, 5);
  const Four low1 = __builtin_shufflevector(x[2], x[3], 0, 4, 1, 5);
  const Four high0 = __builtin_shufflevector(x[0], x[1], 2, 6, 3, 7);
  const Four high1 = __builtin_shufflevector(x[2], x[3], 2, 6, 3, 7);
  x[0] = __builtin_shufflevector(low0, low1, 0, 1, 4, 5);
  x[1] = __builtin_shufflevector(low0, low1, 2, 3, 6, 7);
  x[2] = __builtin_shufflevector(high0, high1, 0, 1, 4, 5);
  x[3] = __builtin_shufflevector(high0, high1, 2, 3, 6, 7);
  for (int i = 0; i < 4; ++i) std::memcpy(to + i * to_stride, &x[i], sizeof(Four));
}

// Pixels of an image that are turned together: whole vectors, and a cache line.
constexpr std::int64_t kTurnedPixels = 16;
static_assert(kTurnedPixels % kLanes == 0);

// `count` pixels of an image from `pixel` on, of which `product` [count][32] has 32 channels from
// `column` on.
template <Function ACTIVATION>
void finish_pixels(const float* product, std::int64_t image, std::int64_t pixel, std::int64_t count,
                   std::int64_t column, const ProductEpilogue& e) {
  alignas(64) float turned[kDenseColumns * kTurnedPixels];
  const std::int64_t columns = std::min(kDenseColumns, e.m - column);
  for (std::int64_t i = 0; i < count; i += kTurnedPixels) {
    const std::int64_t pixels = std::min(kTurnedPixels, count - i);
    const float* from = product + i * kDenseColumns;
    std::int64_t row = 0;
    for (; row + 4 <= pixels; row += 4) {
      for (std::int64_t c = 0; c < columns; c += 4)
        transpose_square(from + row * kDenseColumns + c, turned + c * kTurnedPixels + row,
                         kTurnedPixels);
    }
    for (; row < pixels; ++row) {
      for (std::int64_t c = 0; c < columns; ++c)
        turned[c * kTurnedPixels + row] = from[row * kDenseColumns + c];
    }
    for (std::int64_t c = 0; c < columns; ++c) {
      const Vector bias = broadcast(e.bias == nullptr ? 0.0F : e.bias[column + c]);
      const std::int64_t at = (image * e.image_channels + column + c) * e.plane + pixel + i;
      for (std::int64_t j = 0; j < pixels; j += kLanes) {
        const std::int64_t lanes = std::min<std::int64_t>(kLanes, pixels - j);
        Vector value = load(turned + c * kTurnedPixels + j) + bias;
        if (e.residual != nullptr) value += load_some(e.residual + at + j, lanes);
        store_some(e.y + at + j, apply<ACTIVATION>(value), lanes);
      }
    }
  }
}

// Image by image.
void finish_images(const float* product, std::int64_t first, std::int64_t count,
                   std::int64_t column, const ProductEpilogue& e) {
  for (std::int64_t row = 0; row < count;) {
    const std::int64_t at = e.first_pixel + first + row;
    const std::int64_t pixels = std::min(count - row, e.plane - at % e.plane);
    const float* rows = product + row * kDenseColumns;
    if (e.activation == Function::kRelu) {
      finish_pixels<Function::kRelu>(rows, at / e.plane, at % e.plane, pixels, column, e);
    } else {
      finish_pixels<Function::kNone>(rows, at / e.plane, at % e.plane, pixels, column, e);
    }
    row += pixels;
  }
}

// Row by row, all blocks of a row one after the other, because memory takes neighbouring stores
// faster.
void finish_product(const float* product, std::int64_t blocks, std::int64_t first,
                    std::int64_t count, std::int64_t column, const ProductEpilogue& e) {
  if (e.plane > 0) return finish_images(product, first, count, column, e);
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
