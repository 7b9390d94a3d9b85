// SPDX-License-Identifier: Apache-2.0
// How Q4NXMatMul is cut into tasks: a pure function of the product's shape and the threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/formats/q4nx.h"

namespace flownpu::cpu {

// The most rows of activations that a task multiplies. Unpacking 32 rows of the weight costs as
// much as multiplying some 6 rows of activations, 2 % of 256. A kernel's range of these rows (1 KB
// each) and the results of four rows of blocks fill 256 KB + 128 KB of an L2 of 1 MB.
inline constexpr std::int64_t kTaskRows = 256;
inline constexpr std::int64_t kTaskRowBlocks = 4;
// How many results of 32 rows of the weight a task keeps before it writes them: rows of blocks
// times rows of activations. A few rows of activations get many rows of blocks at once, read as one
// stream.
inline constexpr std::int64_t kMaxProducts = kTaskRows * kTaskRowBlocks;

// A result larger than the second-level caches of two cores (1 MB each) is written past the caches:
// a later reader would not find it there, and ordinary stores read each line first. This read
// prompts of 1024 tokens 4.9 % faster (Qwen3-0.6B; Gemma3-1B 2.9 %). Prompts of 64 tokens, which
// have smaller results, became 3 % slower when they were streamed too.
inline constexpr std::int64_t kStreamedBytes = 2 << 20;

// Part `index` of `parts` nearly equal parts of [0, whole).
struct Interval {
  std::int64_t begin;
  std::int64_t end;
};
constexpr Interval part(std::int64_t whole, std::int64_t parts, std::int64_t index) {
  return {whole * index / parts, whole * (index + 1) / parts};
}

// Task t multiplies part t % block_parts of the rows of blocks with part t / block_parts of the
// rows of activations.
struct MatMulPlan {
  std::int64_t row_parts;
  std::int64_t block_parts;
};

// rows, row_blocks, threads > 0. The parts of the rows are nearly equal. A kernel would take a
// small part for a product of few rows, which rounds in another order.
constexpr MatMulPlan plan_matmul(std::int64_t rows, std::int64_t row_blocks, std::int64_t threads) {
  // 8 tasks a thread: small enough to even out a thread that started late, large enough to read
  // 100 KB in a row.
  constexpr std::int64_t kTasksPerThread = 8;
  return {q4nx::ceil_div(rows, kTaskRows), std::min(row_blocks, kTasksPerThread * threads)};
}

}  // namespace flownpu::cpu
