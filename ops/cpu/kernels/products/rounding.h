// SPDX-License-Identifier: Apache-2.0
// Functions for rounding activations: groups of 32 columns, and the scales of int8.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>

#include "ops/cpu/kernels.h"
#include "ops/cpu/kernels/vector.h"
#include "ops/formats/q4nx.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// The 32 values of a group, zero past the end of a row.
struct Group {
  static constexpr int kVectors = static_cast<int>(q4nx::kGroup) / kLanes;
  Vector part[kVectors];
};

// The values of a row of k from `start` on.
inline Group load_group(const float* x, std::int64_t start, std::int64_t k) {
  Group group;
  if (k - start >= q4nx::kGroup) {
    for (int v = 0; v < Group::kVectors; ++v) group.part[v] = load(x + start + v * kLanes);
    return group;
  }
  group = {};
  if (start < k)
    std::memcpy(&group, x + start, static_cast<std::size_t>(k - start) * sizeof(float));
  return group;
}

// Stores a group of integers up to 127, or without a sign up to 255. With AVX2 four instructions
// narrow 32 of them, where store_bytes takes nine for 8.
template <bool SIGNED = true>
void store_group(std::int8_t* out, const Integers (&group)[Group::kVectors]) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const auto pack = [&](int v) {
    return _mm256_packs_epi32(reinterpret_cast<__m256i>(group[v]),
                              reinterpret_cast<__m256i>(group[v + 1]));
  };
  // Each half of the vectors is packed by itself, four bytes of each vector in turn.
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i packed =
      SIGNED ? _mm256_packs_epi16(pack(0), pack(2)) : _mm256_packus_epi16(pack(0), pack(2));
  const __m256i bytes = _mm256_permutevar8x32_epi32(packed, order);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), bytes);
#else
  for (int v = 0; v < Group::kVectors; ++v) store_bytes(out + v * kLanes, group[v]);
#endif
}

// The largest magnitude of `columns` columns from `start` on; NaN if one is NaN.
inline float largest_magnitude(const float* x, std::int64_t start, std::int64_t columns,
                               std::int64_t k) {
  Vector magnitudes{};
  for (std::int64_t at = start; at < std::min(start + columns, k); at += q4nx::kGroup) {
    // Prefetches 16 groups ahead, 32 lines; other distances were not tried.
    __builtin_prefetch(x + at + 16 * q4nx::kGroup);
    __builtin_prefetch(x + at + 16 * q4nx::kGroup + q4nx::kGroup / 2);
    for (const Vector part : load_group(x, at, k).part)
      magnitudes = larger_magnitude(magnitudes, magnitude(part));
  }
  return reduce_larger_magnitude(magnitudes);
}

// The rounding of a part's `columns` columns from `start` on: x = scale * integer, integer = x *
// inverse to the nearest.
struct Int8Scale {
  float scale;
  float inverse;
};

inline Int8Scale int8_scale(const float* x, std::int64_t start, std::int64_t columns,
                            std::int64_t k, int largest_integer = kLargestInt8) {
  // Up to this magnitude, no more than 4e-37, 127 / largest would be infinite. Such columns count
  // as 0.
  constexpr float kNegligible = kLargestInt8 / std::numeric_limits<float>::max();
  const auto steps = static_cast<float>(largest_integer);
  const float largest = largest_magnitude(x, start, columns, k);
  return {largest / steps, largest > kNegligible ? steps / largest : 0.0F};
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
