// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/products/router.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "ops/cpu/products/expert_rows.h"
#include "ops/cpu/products/q4nx_matmul_plan.h"

namespace flownpu::cpu {

void Router::rank(const Kernels& kernels, ThreadPool& pool, const DenseWeight& weight,
                  const float* x, std::int64_t rows, float* logits) const {
  const std::int64_t threads = pool.threads();
  const std::int64_t parts = rows < threads ? std::min(threads, experts) : 1;
  pool.run(rows * parts, [&](std::int64_t task) {
    const std::int64_t row = task / parts;
    const auto [begin, end] = part(experts, parts, task % parts);
    kernels.dense_rows(weight, x + row * hidden, 1, begin, end, logits + row * experts + begin);
  });
}

void Router::choose(const Kernels& kernels, ThreadPool& pool, std::int64_t rows, float* logits,
                    const float* bias, std::int32_t* chosen, float* shares) const {
  pool.run_rows(rows, [&](std::int64_t row) {
    float* of_row = logits + row * experts;
    std::int32_t* experts_of_row = chosen + row * per_row;
    float* shares_of_row = shares + row * per_row;
    float* ranked = of_row;
    if (has_bias) {
      kernels.apply(Function::kSigmoid, of_row, of_row, experts);
      ranked += rows * experts;
      std::transform(of_row, of_row + experts, bias, ranked, std::plus<>());
    }
    choose_experts({ranked, static_cast<std::size_t>(experts)},
                   {experts_of_row, static_cast<std::size_t>(per_row)});
    if (!normalize && !has_bias) kernels.softmax(of_row, of_row, experts);
    for (std::int64_t i = 0; i < per_row; ++i) shares_of_row[i] = of_row[experts_of_row[i]];
    if (has_bias) {
      const float sum = std::accumulate(shares_of_row, shares_of_row + per_row, 0.0F);
      for (std::int64_t i = 0; i < per_row; ++i) shares_of_row[i] /= sum;
    } else if (normalize) {
      kernels.softmax(shares_of_row, shares_of_row, per_row);
    }
  });
}

}  // namespace flownpu::cpu
