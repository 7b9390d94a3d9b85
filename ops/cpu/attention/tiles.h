// SPDX-License-Identifier: Apache-2.0
// Tiles of queries, which are the unit of work of attention, and the distribution of tasks of
// unequal length.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "ops/cpu/step.h"

namespace flownpu::cpu {

// Memory for a tile of `rows` rows; a row is a query of one head of d elements.
struct TileMemory {
  // `kernel_bytes`: Kernels::attention_scratch, or 0 for the kernel of few rows.
  TileMemory(Scratch& scratch, std::int64_t rows, std::int64_t d, std::int64_t kernel_bytes)
      : query(scratch.take<float>(rows * d)),
        maximum(scratch.take<float>(rows)),
        denominator(scratch.take<float>(rows)),
        numerator(scratch.take<float*>(rows)),
        bias(scratch.take<const float*>(rows)),
        first_key(scratch.take<std::int32_t>(rows)),
        last_key(scratch.take<std::int32_t>(rows)),
        kernel(kernel_bytes > 0 ? scratch.take<std::byte>(kernel_bytes) : nullptr) {}

  float* query;
  float* maximum;
  float* denominator;
  float** numerator;
  const float** bias;
  std::int32_t* first_key;
  std::int32_t* last_key;
  std::byte* kernel;
};

// O = Y / l (eq. 12), in place, of d elements; a query that saw nothing is zero.
inline void divide(float* numerator, float denominator, std::int64_t d) {
  const float inverse = denominator > 0 ? 1.0F / denominator : 0.0F;
  for (std::int64_t i = 0; i < d; ++i) numerator[i] *= inverse;
}

// Calls task(index, thread) for every index in [0, tasks), in their order: a thread that is free
// takes the next one.
template <typename Task>
void run_in_order(ThreadPool& pool, std::int64_t tasks, const Task& task) {
  std::atomic<std::int64_t> next{0};
  pool.run(std::min<std::int64_t>(pool.threads(), tasks),
           [&](std::int64_t /*index*/, std::size_t thread) {
             for (std::int64_t index = next++; index < tasks; index = next++) task(index, thread);
           });
}

}  // namespace flownpu::cpu
