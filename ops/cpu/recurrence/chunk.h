// SPDX-License-Identifier: Apache-2.0
// Linear attention of a chunk of tokens in matrix products, which give what the recurrence gives.
// With G_i the sum of the decays up to token i and D_ij = exp(G_i - G_j):
//   (I + tril(diag(beta) (K K^T * D), -1)) U = diag(beta) (V - exp(G) K S), or U = V without delta
//   O = scale (exp(G) Q S + tril(Q K^T * D) U)
//   S <- exp(G_C) S + (exp(G_C - G) K)^T U
// (Yang et al., "Gated Delta Networks", 2024, section 3.3.)
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/cpu/products/dense_matmul.h"
#include "ops/cpu/step.h"

namespace flownpu::cpu {

// The tokens of a chunk: twice as many need twice the multiply-adds between tokens, and half the
// products with the state.
inline constexpr std::int64_t kChunkTokens = 64;

// A sequence's tokens of one head of keys and values. Rows of queries, keys, values and outputs are
// `.._stride` floats apart.
struct ChunkCall {
  // f32 [key_size][value_size].
  float* state = nullptr;
  std::int64_t key_size = 0;
  std::int64_t value_size = 0;
  std::int64_t tokens = 0;
  const float* key = nullptr;
  std::int64_t key_stride = 0;
  const float* value = nullptr;
  std::int64_t value_stride = 0;
  // The logarithm of the factor of the state at each token, and the rate of its update; null: 0, and
  // no delta rule.
  const float* decay = nullptr;
  std::int64_t decay_stride = 0;
  const float* beta = nullptr;
  std::int64_t beta_stride = 0;
  float scale = 1;
  // Queries that share the state, next to each other.
  std::int64_t queries = 1;
  const float* query = nullptr;
  std::int64_t query_stride = 0;
  float* output = nullptr;
  std::int64_t output_stride = 0;
};

class ChunkProducts {
 public:
  explicit ChunkProducts(const Context& context) : kernels_(context.kernels), product_(context) {}

  // Bytes that run() needs for that many queries of a state, 64-byte aligned.
  std::size_t scratch_bytes(std::int64_t key_size, std::int64_t value_size,
                            std::int64_t queries) const;
  // At most kChunkTokens tokens.
  void run(const ChunkCall& call, std::byte* scratch) const;

 private:
  struct Work;

  Work take(Scratch& scratch, std::int64_t key_size, std::int64_t value_size,
            std::int64_t queries) const;
  void gather(const ChunkCall& call, const Work& work) const;
  void solve(const ChunkCall& call, const Work& work) const;
  void answer(const ChunkCall& call, const Work& work) const;
  // y[rows][m] = x[rows][k] W, added to y if `adds`.
  void multiply(const float* x, std::int64_t rows, const float* weight, std::int64_t k,
                std::int64_t m, bool transposed, bool adds, float* y, std::byte* scratch) const;

  const Kernels& kernels_;
  DenseProduct product_;
};

}  // namespace flownpu::cpu
