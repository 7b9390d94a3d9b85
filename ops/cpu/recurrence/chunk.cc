// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/recurrence/chunk.h"

#include <algorithm>
#include <cmath>

namespace flownpu::cpu {

struct ChunkProducts::Work {
  float* sums;      // G [C]
  float* keys;      // [C][key_size]
  float* turned;    // [key_size][C]
  float* queries;   // [C][key_size]
  float* scores;    // [C][C]
  float* updates;   // U [C][value_size]
  float* read;      // what the state gives, [C][value_size]
  std::byte* product;
};

ChunkProducts::Work ChunkProducts::take(Scratch& scratch, std::int64_t key_size,
                                        std::int64_t value_size) const {
  constexpr std::int64_t kC = kChunkTokens;
  const std::size_t bytes = std::max({product_.scratch_bytes(kC, key_size, kC),
                                      product_.scratch_bytes(kC, key_size, value_size),
                                      product_.scratch_bytes(kC, kC, value_size),
                                      product_.scratch_bytes(key_size, kC, value_size)});
  return {.sums = scratch.take<float>(kC),
          .keys = scratch.take<float>(kC * key_size),
          .turned = scratch.take<float>(kC * key_size),
          .queries = scratch.take<float>(kC * key_size),
          .scores = scratch.take<float>(kC * kC),
          .updates = scratch.take<float>(kC * value_size),
          .read = scratch.take<float>(kC * value_size),
          .product = scratch.take<std::byte>(static_cast<std::int64_t>(bytes))};
}

std::size_t ChunkProducts::scratch_bytes(std::int64_t key_size, std::int64_t value_size) const {
  Scratch scratch;
  take(scratch, key_size, value_size);
  return scratch.bytes();
}

void ChunkProducts::run(const ChunkCall& call, std::byte* scratch) const {
  Scratch parts(scratch);
  const Work work = take(parts, call.key_size, call.value_size);
  float sum = 0;
  for (std::int64_t i = 0; i < call.tokens; ++i) {
    if (call.decay != nullptr) sum += call.decay[i * call.decay_stride];
    work.sums[i] = sum;
    std::copy_n(call.key + i * call.key_stride, call.key_size, work.keys + i * call.key_size);
    std::copy_n(call.value + i * call.value_stride, call.value_size,
                work.updates + i * call.value_size);
  }
  if (call.beta != nullptr) solve(call, work);
  for (std::int64_t query = 0; query < call.queries; ++query) answer(call, work, query);
  change_state(call, work);
}

void ChunkProducts::multiply(const float* x, std::int64_t rows, const float* weight,
                             std::int64_t k, std::int64_t m, bool transposed,
                             const float* residual, float* y, std::byte* scratch) const {
  ProductEpilogue epilogue;
  epilogue.residual = residual;
  epilogue.y = y;
  epilogue.m = m;
  product_.run(x, rows, {weight, DataType::kFloat32, k, m, transposed, nullptr}, epilogue, scratch);
}

// U by forward substitution: row i needs the rows before it.
void ChunkProducts::solve(const ChunkCall& call, const Work& work) const {
  multiply(work.keys, call.tokens, call.state, call.key_size, call.value_size, false, nullptr,
           work.read, work.product);
  multiply(work.keys, call.tokens, work.keys, call.key_size, call.tokens, true, nullptr,
           work.scores, work.product);
  for (std::int64_t i = 0; i < call.tokens; ++i) {
    float* row = work.updates + i * call.value_size;
    kernels_.add_scaled(work.read + i * call.value_size, -std::exp(work.sums[i]), row,
                        call.value_size);
    for (std::int64_t j = 0; j < i; ++j) {
      const float factor = work.scores[i * call.tokens + j] * std::exp(work.sums[i] - work.sums[j]);
      kernels_.add_scaled(work.updates + j * call.value_size, -factor, row, call.value_size);
    }
    const float beta = call.beta[i * call.beta_stride];
    for (std::int64_t c = 0; c < call.value_size; ++c) row[c] *= beta;
  }
}

void ChunkProducts::answer(const ChunkCall& call, const Work& work, std::int64_t query) const {
  for (std::int64_t i = 0; i < call.tokens; ++i) {
    const float* from = call.query + i * call.query_stride + query * call.key_size;
    for (std::int64_t c = 0; c < call.key_size; ++c)
      work.queries[i * call.key_size + c] = call.scale * from[c];
  }
  multiply(work.queries, call.tokens, work.keys, call.key_size, call.tokens, true, nullptr,
           work.scores, work.product);
  multiply(work.queries, call.tokens, call.state, call.key_size, call.value_size, false, nullptr,
           work.read, work.product);
  for (std::int64_t i = 0; i < call.tokens; ++i) {
    float* scores = work.scores + i * call.tokens;
    for (std::int64_t j = 0; j <= i; ++j) scores[j] *= std::exp(work.sums[i] - work.sums[j]);
    std::fill(scores + i + 1, scores + call.tokens, 0.0F);
    const float kept = std::exp(work.sums[i]);
    for (std::int64_t c = 0; c < call.value_size; ++c) work.read[i * call.value_size + c] *= kept;
  }
  multiply(work.scores, call.tokens, work.updates, call.tokens, call.value_size, false, work.read,
           work.read, work.product);
  for (std::int64_t i = 0; i < call.tokens; ++i) {
    std::copy_n(work.read + i * call.value_size, call.value_size,
                call.output + i * call.output_stride + query * call.value_size);
  }
}

void ChunkProducts::change_state(const ChunkCall& call, const Work& work) const {
  const float last = work.sums[call.tokens - 1];
  for (std::int64_t i = 0; i < call.tokens; ++i) {
    const float factor = std::exp(last - work.sums[i]);
    for (std::int64_t c = 0; c < call.key_size; ++c)
      work.turned[c * call.tokens + i] = factor * work.keys[i * call.key_size + c];
  }
  const float kept = std::exp(last);
  for (std::int64_t i = 0; i < call.key_size * call.value_size; ++i) call.state[i] *= kept;
  multiply(work.turned, call.key_size, work.updates, call.tokens, call.value_size, false,
           call.state, call.state, work.product);
}

}  // namespace flownpu::cpu
