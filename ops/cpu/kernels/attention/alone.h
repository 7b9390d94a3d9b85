// SPDX-License-Identifier: Apache-2.0
// Rows that meet an infinity or NaN that they do not see. Rows that are computed together multiply
// a value by 0 if they do not see its key; 0 times an infinity or NaN is NaN, so such a row is
// computed again by itself. Callers: select.cc, amx/attention.h.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ops/cpu/kernels.h"
#include "ops/cpu/kernels/vector.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// Whether any of them is infinite or NaN.
inline bool any_not_finite(const float* x, std::int64_t n) {
  Vector zeros{};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) zeros += load(x + i) * 0.0F;
  float zero = reduce_add(zeros);
  for (; i < n; ++i) zero += x[i] * 0.0F;
  return zero != 0;
}

using Sweep = void (*)(const AttentionSweep& sweep);

// Computes row r by itself, over the keys that it sees: from paged caches by `many`, else by `few`.
inline void attend_alone(const AttentionSweep& sweep, std::int64_t r, Sweep few, Sweep many) {
  const std::int64_t first = sweep.first_key[r];
  constexpr std::int32_t kFirst = 0;
  const std::int32_t last = std::max(sweep.last_key[r] - sweep.first_key[r], 0);
  AttentionSweep alone = sweep;
  alone.query += r * sweep.head_size;
  alone.rows = 1;
  alone.maximum += r;
  alone.denominator += r;
  alone.numerator += r;
  if (sweep.blocks != nullptr) {
    alone.first_key += r;
    alone.last_key += r;
    alone.keys = sweep.last_key[r];
    return many(alone);
  }
  alone.key = static_cast<const std::byte*>(sweep.key) + first * sweep.row_bytes;
  alone.value = static_cast<const std::byte*>(sweep.value) + first * sweep.row_bytes;
  alone.position += first;
  alone.keys = last;
  alone.first_key = &kFirst;
  alone.last_key = &last;
  const float* bias = sweep.bias == nullptr ? nullptr : sweep.bias[r] + first;
  alone.bias = sweep.bias == nullptr ? nullptr : &bias;
  few(alone);
}

inline void attend_alone_where_not_finite(const AttentionSweep& sweep, Sweep few, Sweep many) {
  for (std::int64_t r = 0; r < sweep.rows; ++r) {
    const bool sees_all = sweep.first_key[r] <= sweep.begin && sweep.last_key[r] == sweep.keys;
    if (!sees_all && any_not_finite(sweep.numerator[r], sweep.head_size))
      attend_alone(sweep, r, few, many);
  }
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
