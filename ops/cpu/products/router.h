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
  // Whether experts have a bias: sigmoids of logits, plus the bias, are ranked, and the sigmoids of
  // the chosen ones divided by their sum are the shares.
  bool has_bias = false;

  // How many numbers `choose` takes and writes over, of which `rank` writes the first.
  std::int64_t numbers(std::int64_t rows) const { return rows * experts * (has_bias ? 2 : 1); }

  // logits[rows][experts] = x[rows][hidden] . weight^T. `weight`: [experts, hidden], transposed.
  void rank(const Kernels& kernels, ThreadPool& pool, const DenseWeight& weight, const float* x,
            std::int64_t rows, float* logits) const;
  // The experts [rows][per_row] with the largest logits, in the order of their numbers, and their
  // shares. Writes over the logits. `bias`: [experts], if there is one.
  void choose(const Kernels& kernels, ThreadPool& pool, std::int64_t rows, float* logits,
              const float* bias, std::int32_t* chosen, float* shares) const;
};

}  // namespace flownpu::cpu
