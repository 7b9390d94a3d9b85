// SPDX-License-Identifier: Apache-2.0
// A row of an int8 KV cache: `head_size` codes, then their scale, an f32 (kInt8ScaleBytes); an
// element is scale * code.
//
// scale = bf16(max|x| / 127), code = round(x / scale), both to nearest even: |x - scale * code| <=
// scale / 2, because the scale's own rounding is at most 2^-9 of it, so that max|x| / scale <=
// 127.25 still has the code 127. A scale of 8 bits times a code of 7 bits is exact in f32. A row
// that comes out of a cache is rounded to the same bits again. A row whose scale would be below
// 2^-126 is 0. A row with a number that is not finite has the scale NaN, and is NaN.
// ops/definitions/int8_cache.py defines the same.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "ops/cpu/kernels/vector.h"
#include "ops/nodes/kv_cache.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

inline float int8_row_scale(const void* row, std::int64_t head_size) {
  float scale;
  std::memcpy(&scale, static_cast<const std::byte*>(row) + head_size, sizeof(scale));
  return scale;
}

// The largest magnitude of n elements; NaN if one is NaN.
inline float largest_magnitude(const float* x, std::int64_t n) {
  Vector largest{};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) largest = larger_magnitude(largest, magnitude(load(x + i)));
  if (i < n) largest = larger_magnitude(largest, magnitude(load_some(x + i, n - i)));
  return reduce_larger_magnitude(largest);
}

// Rounds x[n] to a row: n codes and their scale.
inline void store_int8_row(const float* x, void* out, std::int64_t n) {
  auto* codes = static_cast<std::int8_t*>(out);
  float scale = float_from_bf16(bf16_from_float(largest_magnitude(x, n) / 127.0F));
  if (!std::isfinite(scale)) scale = std::numeric_limits<float>::quiet_NaN();
  if (scale < std::numeric_limits<float>::min()) scale = 0.0F;
  std::memcpy(codes + n, &scale, sizeof(scale));
  if (!(scale > 0)) {
    std::memset(codes, 0, static_cast<std::size_t>(n));
    return;
  }
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vector code = round_to_integer(load(x + i) / broadcast(scale));
    store_bytes(codes + i, __builtin_convertvector(code, Integers));
  }
  for (; i < n; ++i) codes[i] = static_cast<std::int8_t>(std::nearbyint(x[i] / scale));
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
