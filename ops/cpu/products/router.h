// SPDX-License-Identifier: Apache-2.0
// The router of a mixture of experts: which experts a row gets, and the share of each.
#pragma once

#include <cstdint>

#include "ops/cpu/kernels.h"
#include "ops/cpu/thread_pool.h"

namespace flownpu::cpu {

struct Router {
  std::int64_t experts = 0;
  std::int64_t per_row = 0;  // experts of a row
  std::int64_t hidden = 0;   // elements of a row
  // Whether the softmax is over the chosen experts' logits, or over all.
  bool normalize = true;

  // logits[rows][experts] = x[rows][hidden] . weight^T. `weight`: [experts, hidden], transposed.
  void rank(const Kernels& kernels, ThreadPool& pool, const DenseWeight& weight, const float* x,
            std::int64_t rows, float* logits) const;
  // The experts [rows][per_row] with the largest logits, in the order of their numbers, and their
  // shares. Writes over the logits.
  void choose(const Kernels& kernels, ThreadPool& pool, std::int64_t rows, float* logits,
              std::int32_t* chosen, float* shares) const;
};

}  // namespace flownpu::cpu
