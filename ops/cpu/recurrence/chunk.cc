// SPDX-License-Identifier: Apache-2.0
// Dataflow: keys and queries lie below one another, because they are multiplied by the state and by
// the keys alike; so do the scores of the queries and the keys of the state's change, which are
// multiplied by U. So a chunk packs three right operands, S, K^T and U.
#include "ops/cpu/recurrence/chunk.h"

#include <algorithm>
#include <cmath>

namespace flownpu::cpu {

// C tokens, Q = C queries rows of queries.
struct ChunkProducts::Work {
  float* decays;   // D [C][C], of which the part up to the diagonal is filled
  float* kept;     // exp(G) [C]
  float* rows;     // K, then scale Q for each query: [C + Q][key_size]
  float* scores;   // rows K^T [C + Q][C]
  float* read;     // rows S [C + Q][value_size]
  float* updates;  // U [C][value_size]
  float* factors;  // tril(Q K^T * D), then (exp(G_C - G) K)^T: [Q + key_size][C]
  float* results;  // O, then S: [Q + key_size][value_size]
  std::byte* product;
};

ChunkProducts::Work ChunkProducts::take(Scratch& scratch, std::int64_t key_size,
                                        std::int64_t value_size, std::int64_t queries) const {
  constexpr std::int64_t kC = kChunkTokens;
  const std::int64_t rows = kC * (1 + queries);
  const std::int64_t changed = kC * queries + key_size;
  const std::size_t bytes = std::max({product_.scratch_bytes(rows, key_size, kC),
                                      product_.scratch_bytes(rows, key_size, value_size),
                                      product_.scratch_bytes(changed, kC, value_size)});
  return {.decays = scratch.take<float>(kC * kC),
          .kept = scratch.take<float>(kC),
          .rows = scratch.take<float>(rows * key_size),
          .scores = scratch.take<float>(rows * kC),
          .read = scratch.take<float>(rows * value_size),
          .updates = scratch.take<float>(kC * value_size),
          .factors = scratch.take<float>(changed * kC),
          .results = scratch.take<float>(changed * value_size),
          .product = scratch.take<std::byte>(static_cast<std::int64_t>(bytes))};
}

std::size_t ChunkProducts::scratch_bytes(std::int64_t key_size, std::int64_t value_size,
                                         std::int64_t queries) const {
  Scratch scratch;
  take(scratch, key_size, value_size, queries);
  return scratch.bytes();
}

void ChunkProducts::run(const ChunkCall& call, std::byte* scratch) const {
  Scratch parts(scratch);
  const Work work = take(parts, call.key_size, call.value_size, call.queries);
  gather(call, work);
  const std::int64_t rows = call.tokens * (1 + call.queries);
  multiply(work.rows, rows, work.rows, call.key_size, call.tokens, true, false, work.scores,
           work.product);
  multiply(work.rows, rows, call.state, call.key_size, call.value_size, false, false, work.read,
           work.product);
  if (call.beta != nullptr) solve(call, work);
  answer(call, work);
}

void ChunkProducts::multiply(const float* x, std::int64_t rows, const float* weight,
                             std::int64_t k, std::int64_t m, bool transposed, bool adds, float* y,
                             std::byte* scratch) const {
  ProductEpilogue epilogue;
  epilogue.residual = adds ? y : nullptr;
  epilogue.y = y;
  epilogue.m = m;
  product_.run(x, rows, {weight, DataType::kFloat32, k, m, transposed, nullptr}, epilogue, scratch);
}

void ChunkProducts::gather(const ChunkCall& call, const Work& work) const {
  const std::int64_t tokens = call.tokens;
  float sums[kChunkTokens];  // G
  float sum = 0;
  for (std::int64_t i = 0; i < tokens; ++i) {
    if (call.decay != nullptr) sum += call.decay[i * call.decay_stride];
    sums[i] = sum;
    float* decays = work.decays + i * tokens;
    for (std::int64_t j = 0; j <= i; ++j) decays[j] = sum - sums[j];
    kernels_.apply(Function::kExp, decays, decays, i + 1);
    std::copy_n(call.key + i * call.key_stride, call.key_size, work.rows + i * call.key_size);
    std::copy_n(call.value + i * call.value_stride, call.value_size,
                work.updates + i * call.value_size);
    for (std::int64_t query = 0; query < call.queries; ++query) {
      const float* from = call.query + i * call.query_stride + query * call.key_size;
      float* to = work.rows + ((1 + query) * tokens + i) * call.key_size;
      for (std::int64_t c = 0; c < call.key_size; ++c) to[c] = call.scale * from[c];
    }
  }
  kernels_.apply(Function::kExp, sums, work.kept, tokens);
}

// U by forward substitution: row i needs the rows before it.
void ChunkProducts::solve(const ChunkCall& call, const Work& work) const {
  const std::int64_t width = call.value_size;
  for (std::int64_t i = 0; i < call.tokens; ++i) {
    float* row = work.updates + i * width;
    kernels_.add_scaled(work.read + i * width, -work.kept[i], row, width);
    const float* scores = work.scores + i * call.tokens;
    const float* decays = work.decays + i * call.tokens;
    for (std::int64_t j = 0; j < i; ++j)
      kernels_.add_scaled(work.updates + j * width, -scores[j] * decays[j], row, width);
    const float beta = call.beta[i * call.beta_stride];
    for (std::int64_t c = 0; c < width; ++c) row[c] *= beta;
  }
}

// The outputs, and the state behind the chunk.
void ChunkProducts::answer(const ChunkCall& call, const Work& work) const {
  const std::int64_t tokens = call.tokens;
  const std::int64_t width = call.value_size;
  const std::int64_t queries = tokens * call.queries;
  for (std::int64_t row = 0; row < queries; ++row) {
    const std::int64_t i = row % tokens;
    const float* scores = work.scores + (tokens + row) * tokens;
    float* factors = work.factors + row * tokens;
    for (std::int64_t j = 0; j <= i; ++j) factors[j] = scores[j] * work.decays[i * tokens + j];
    std::fill(factors + i + 1, factors + tokens, 0.0F);
    const float* read = work.read + (tokens + row) * width;
    for (std::int64_t c = 0; c < width; ++c)
      work.results[row * width + c] = work.kept[i] * read[c];
  }
  const float* last = work.decays + (tokens - 1) * tokens;
  float* changes = work.factors + queries * tokens;
  for (std::int64_t i = 0; i < tokens; ++i) {
    for (std::int64_t c = 0; c < call.key_size; ++c)
      changes[c * tokens + i] = last[i] * work.rows[i * call.key_size + c];
  }
  float* state = work.results + queries * width;
  for (std::int64_t c = 0; c < call.key_size * width; ++c)
    state[c] = work.kept[tokens - 1] * call.state[c];
  multiply(work.factors, queries + call.key_size, work.updates, tokens, width, false, true,
           work.results, work.product);
  std::copy_n(state, call.key_size * width, call.state);
  for (std::int64_t row = 0; row < queries; ++row) {
    std::copy_n(work.results + row * width, width,
                call.output + row % tokens * call.output_stride + row / tokens * width);
  }
}

}  // namespace flownpu::cpu
