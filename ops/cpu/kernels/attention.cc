// SPDX-License-Identifier: Apache-2.0
// One chunk of FlowQKV / FlowKV (Gemma3 paper, section 3.1.3, eq. 6-11; decode, section 3.2.2, has
// one query row a head).
//
// Dataflow: scores S = Q K^T (eq. 6) tile by tile into scratch[rows][64]; then row by row the mask,
// the new maximum m (eq. 7), F = exp(S - m) (eq. 8) in place, the correction C = exp(m_left - m)
// (eq. 9) and the denominator (eq. 10); then Y = C Y_left + F V (eq. 11). K and V are read as they
// lie in the cache, converted in registers. Caller: flow_qkv_attention.cc and flow_kv_attention.cc
// of the CPU device.
#include <cmath>
#include <limits>
#include <utility>

#include "ops/cpu/kernels/tables.h"
#include "ops/cpu/kernels/vector.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// A tile of scores is kTileRows x kTileKeys partial sums, one vector each: as many as a vector has
// lanes, so that they are summed across lanes by one tree (16 of 32 registers with AVX-512, 8 of 16
// with AVX2).
constexpr int kTileKeys = 4;
constexpr int kTileRows = kLanes / kTileKeys;

// A tile of values is kValueRows x kValueVectors numerators: half of the registers.
constexpr int kValueRows = 4;
constexpr int kValueVectors = kLanes == 16 ? 4 : 2;

template <int... I>
Vector add_neighbours(Vector a, Vector b, std::integer_sequence<int, I...> /*lanes*/) {
  return __builtin_shufflevector(a, b, (2 * I)...) + __builtin_shufflevector(a, b, (2 * I + 1)...);
}

// {even elements of a, even elements of b} + {odd elements of a, odd elements of b}.
Vector add_neighbours(Vector a, Vector b) {
  return add_neighbours(a, b, std::make_integer_sequence<int, kLanes>());
}

// Lane i of the result is the sum over the lanes of sums[i].
Vector sum_each(Vector* sums) {
  for (int count = kLanes; count > 1; count /= 2) {
    for (int i = 0; i < count / 2; ++i) sums[i] = add_neighbours(sums[2 * i], sums[2 * i + 1]);
  }
  return sums[0];
}

template <typename Type>
float dot(const float* query, const typename Type::Element* key, std::int64_t from,
          std::int64_t n) {
  float sum = 0;
  for (std::int64_t i = from; i < n; ++i) sum += query[i] * Type::load_one(key + i);
  return sum;
}

// scores[row][key] for kTileRows rows from `row`, kTileKeys keys from `key`. Rows and keys past the
// end repeat the last one; their results are not stored.
template <typename Type>
void score_tile(const AttentionChunk& chunk, std::int64_t row, std::int64_t key, float* scores) {
  const std::int64_t d = chunk.head_size;
  const auto* keys = static_cast<const typename Type::Element*>(chunk.key);
  const float* query[kTileRows];
  const typename Type::Element* cached[kTileKeys];
  for (int r = 0; r < kTileRows; ++r) {
    query[r] = chunk.query + (row + r < chunk.rows ? row + r : chunk.rows - 1) * d;
  }
  for (int j = 0; j < kTileKeys; ++j)
    cached[j] = keys + (key + j < chunk.keys ? key + j : chunk.keys - 1) * d;

  Vector sums[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= d; i += kLanes) {
    Vector k[kTileKeys];
    for (int j = 0; j < kTileKeys; ++j) k[j] = Type::load_vector(cached[j] + i);
    for (int r = 0; r < kTileRows; ++r) {
      const Vector q = load(query[r] + i);
      for (int j = 0; j < kTileKeys; ++j) sums[r * kTileKeys + j] += q * k[j];
    }
  }
  float tile[kLanes];
  store(tile, sum_each(sums));
  for (int r = 0; r < kTileRows && row + r < chunk.rows; ++r) {
    for (int j = 0; j < kTileKeys && key + j < chunk.keys; ++j) {
      const float rest = i < d ? dot<Type>(query[r], cached[j], i, d) : 0.0F;
      scores[(row + r) * kAttentionChunk + key + j] = tile[r * kTileKeys + j] + rest;
    }
  }
}

// Softcap and bias of one row, in place.
void adjust_scores(const AttentionChunk& chunk, std::int64_t row, float* scores) {
  for (std::int64_t j = chunk.first_key[row]; j < chunk.last_key[row]; ++j) {
    if (chunk.softcap > 0) scores[j] = chunk.softcap * std::tanh(scores[j] / chunk.softcap);
    if (chunk.bias != nullptr) scores[j] += chunk.bias[row][j];
  }
}

// Eq. 7-10 for one row: `scores` becomes F, zero where the row does not look. Returns C.
float softmax_row(const AttentionChunk& chunk, std::int64_t row, float* scores) {
  const std::int64_t first = chunk.first_key[row];
  const std::int64_t last = chunk.last_key[row];
  if (chunk.softcap > 0 || chunk.bias != nullptr) adjust_scores(chunk, row, scores);
  // Minus infinity where the row does not look: exp makes it 0.
  const float nothing = -std::numeric_limits<float>::infinity();
  for (std::int64_t j = 0; j < first; ++j) scores[j] = nothing;
  for (std::int64_t j = last > first ? last : 0; j < kAttentionChunk; ++j) scores[j] = nothing;

  Vector largest = load(scores);
  for (std::int64_t j = kLanes; j < kAttentionChunk; j += kLanes) {
    largest = max(largest, load(scores + j));
  }
  float maximum = reduce_max(largest);
  maximum = maximum > chunk.maximum[row] ? maximum : chunk.maximum[row];
  // Nothing seen so far, or all of it masked away by a bias of minus infinity.
  if (maximum == nothing) {
    for (std::int64_t j = 0; j < kAttentionChunk; ++j) scores[j] = 0;
    return 1.0F;
  }
  Vector sum{};
  for (std::int64_t j = 0; j < kAttentionChunk; j += kLanes) {
    const Vector factor = exp(load(scores + j) - broadcast(maximum));
    store(scores + j, factor);
    sum += factor;
  }
  const float correction = std::exp(chunk.maximum[row] - maximum);
  chunk.maximum[row] = maximum;
  chunk.denominator[row] = correction * chunk.denominator[row] + reduce_add(sum);
  return correction;
}

// Eq. 11 for ROWS rows from `row`, `VECTORS` vectors of the head from element `i`.
template <typename Type, int ROWS, int VECTORS>
void value_tile(const AttentionChunk& chunk, std::int64_t row, std::int64_t i, const float* factors,
                const float* corrections) {
  const std::int64_t d = chunk.head_size;
  const auto* values = static_cast<const typename Type::Element*>(chunk.value) + i;
  Vector y[ROWS][VECTORS];
  for (int r = 0; r < ROWS; ++r) {
    for (int v = 0; v < VECTORS; ++v) {
      y[r][v] = corrections[row + r] * load(chunk.numerator + (row + r) * d + i + v * kLanes);
    }
  }
  for (std::int64_t j = 0; j < chunk.keys; ++j) {
    Vector value[VECTORS];
    for (int v = 0; v < VECTORS; ++v) value[v] = Type::load_vector(values + j * d + v * kLanes);
    for (int r = 0; r < ROWS; ++r) {
      const float f = factors[(row + r) * kAttentionChunk + j];
      for (int v = 0; v < VECTORS; ++v) y[r][v] += f * value[v];
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    for (int v = 0; v < VECTORS; ++v)
      store(chunk.numerator + (row + r) * d + i + v * kLanes, y[r][v]);
  }
}

template <typename Type, int ROWS>
void value_rows(const AttentionChunk& chunk, std::int64_t row, const float* factors,
                const float* corrections) {
  const std::int64_t d = chunk.head_size;
  std::int64_t i = 0;
  for (; i + kValueVectors * kLanes <= d; i += kValueVectors * kLanes) {
    value_tile<Type, ROWS, kValueVectors>(chunk, row, i, factors, corrections);
  }
  for (; i + kLanes <= d; i += kLanes)
    value_tile<Type, ROWS, 1>(chunk, row, i, factors, corrections);
  const auto* values = static_cast<const typename Type::Element*>(chunk.value);
  for (; i < d; ++i) {
    for (int r = 0; r < ROWS; ++r) {
      float y = corrections[row + r] * chunk.numerator[(row + r) * d + i];
      for (std::int64_t j = 0; j < chunk.keys; ++j) {
        y += factors[(row + r) * kAttentionChunk + j] * Type::load_one(values + j * d + i);
      }
      chunk.numerator[(row + r) * d + i] = y;
    }
  }
}

template <typename Type>
void attend_typed(const AttentionChunk& chunk) {
  float* scores = chunk.scratch;
  for (std::int64_t row = 0; row < chunk.rows; row += kTileRows) {
    for (std::int64_t key = 0; key < chunk.keys; key += kTileKeys)
      score_tile<Type>(chunk, row, key, scores);
  }
  float corrections[kAttentionRows];
  for (std::int64_t row = 0; row < chunk.rows; ++row) {
    corrections[row] = softmax_row(chunk, row, scores + row * kAttentionChunk);
  }
  std::int64_t row = 0;
  for (; row + kValueRows <= chunk.rows; row += kValueRows) {
    value_rows<Type, kValueRows>(chunk, row, scores, corrections);
  }
  for (; row < chunk.rows; ++row) value_rows<Type, 1>(chunk, row, scores, corrections);
}

void attend(const AttentionChunk& chunk) {
  switch (chunk.cache_type) {
    case DataType::kBFloat16:
      return attend_typed<BFloat16>(chunk);
    case DataType::kFloat16:
      return attend_typed<Half>(chunk);
    default:
      return attend_typed<Float>(chunk);
  }
}

}  // namespace

void fill_attention(Kernels& kernels) { kernels.attend = attend; }

}  // namespace flownpu::cpu::FLOWNPU_ISA
