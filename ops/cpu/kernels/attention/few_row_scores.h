// SPDX-License-Identifier: Apache-2.0
// The base of the kernels of few rows (flow_kv_attention.h, few_rows_int8.h): the shape of their
// tiles, sums across lanes, and the softmax of a chunk of scores.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "ops/cpu/kernels.h"
#include "ops/cpu/kernels/functions.h"
#include "ops/cpu/kernels/vector.h"
#include "ops/system/processor_features.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// The most rows that attend_few_rows takes: two tiles, each with as many rows as registers allow.
// The tiles pass over the keys in L1 one after the other. For more rows, attend_many multiplies
// less.
constexpr std::int64_t kFewRows = 8;
// `bytes`: the size of a chunk's keys, during whose scoring the values are prefetched.
// `soon_bytes`: the distance of a second prefetch of keys and values.
//
// 16 KB, so that keys and their values lie in L1 (48 KB of a Zen 5); longer chunks need less
// computation, because each chunk ends in sums across the lanes. A core computes with data in L1 at
// 45 to 60 GB/s, but receives data from memory at 35. It drops up to a third of the lines that are
// prefetched a chunk ahead, and would wait for each of them. The second prefetch is 4 KB ahead:
// computing 4 KB takes some 100 ns, as long as the arrival of a line. With both, two threads of a
// Zen 5 read 1055 keys at 0.96 of the pure rate instead of 0.84 (2 rows of 128; 4 rows of 64: 0.93
// instead of 0.89, 4 rows of 256: 0.85 instead of 0.72). 2 KB and 8 KB ahead were a few percent
// slower.
//
// A Zen 4 reads faster if keys and values alternate by pages: with 4 KB and 1 KB two threads, in a
// loop of these kernels alone, read 16,384 keys at 31 GB/s instead of 24 (bf16, 2 rows of 128; 4
// rows: 33 instead of 25, of 64: 30 and 26, of 256: 22 and 22), and int8 keys at 28 instead of 20
// (4 rows: 21 and 18; of 256: 21 and 19).
struct FewKeys {
  std::int64_t bytes;
  std::int64_t soon_bytes;
};
inline FewKeys few_keys() {
  return kAlternateByPages ? FewKeys{4 * 1024, 1024} : FewKeys{16 * 1024, 4 * 1024};
}
constexpr std::int64_t kFewKeysMost = 256;
constexpr int kCacheLine = 64;

// A tile of scores is ROWS rows x kLanes / ROWS keys, with a vector of partial sums for each score:
// as many vectors as a vector has lanes, so that one tree sums them across lanes (16 of 32
// registers with AVX-512, 8 of 16 with AVX2).
//
// A tile of values is ROWS rows x kTileVectors / ROWS vectors of numerators: also half of the
// registers; 8 vectors keep two multipliers with a latency of 4 cycles busy.
constexpr int kTileVectors = kLanes == 16 ? 16 : 8;

// Index for __builtin_shufflevector of a (0 .. kLanes - 1) and b (from kLanes on): the source of
// lane `lane` for the first addend or, with odd = 1, for the second. With DISTANCE 1 and 2 lanes
// move within groups of four, which processors do faster than anything else; with larger ones whole
// groups of four move.
template <int DISTANCE>
constexpr int addend(int lane, int odd) {
  const int four = lane / 4;
  if constexpr (DISTANCE == 1) {  // of each four: a b a b
    return lane % 2 * kLanes + four * 4 + lane % 4 / 2 + 2 * odd;
  } else if constexpr (DISTANCE == 2) {  // of each four: a a b b
    return lane % 4 / 2 * kLanes + four * 4 + lane % 2 + 2 * odd;
  } else {  // every other four of a, then of b
    constexpr int kFours = std::max(kLanes / 8, 1);
    return four / kFours * kLanes + (2 * (four % kFours) + odd) * 4 + lane % 4;
  }
}

template <int DISTANCE, typename V, int... I>
inline V add_pairs(V a, V b, std::integer_sequence<int, I...> /*lanes*/) {
  return __builtin_shufflevector(a, b, addend<DISTANCE>(I, 0)...) +
         __builtin_shufflevector(a, b, addend<DISTANCE>(I, 1)...);
}

// Lane i of the result is the sum over the lanes of sums[i]. V: Vector or Integers.
template <typename V, int COUNT>
inline V sum_each(const V (&sums)[COUNT]) {
  if constexpr (COUNT == 1) {
    return sums[0];
  } else {
    V half[COUNT / 2];  // Unrolled, or GCC keeps it and `sums` in memory.
#pragma GCC unroll 8
    for (int i = 0; i < COUNT / 2; ++i) {
      half[i] = add_pairs<kLanes / COUNT>(sums[2 * i], sums[2 * i + 1],
                                          std::make_integer_sequence<int, kLanes>());
    }
    return sum_each(half);
  }
}

// Scores of a chunk of keys, and their softmax. Derived classes read K and V.
class FewRowScores {
 protected:
  static constexpr float kNothing = -std::numeric_limits<float>::infinity();

  // `element_bytes`: of a key's element.
  FewRowScores(const AttentionSweep& sweep, std::int64_t element_bytes)
      : sweep_(sweep),
        head_size_(sweep.head_size),
        chunk_keys_(std::clamp(few_keys().bytes / (sweep.head_size * element_bytes) /
                                   kAttentionKeyStep * kAttentionKeyStep,
                               kAttentionKeyStep, kFewKeysMost)) {}

  // Calls function(start, keys) for each chunk; chunks are cut at positions that are multiples of
  // chunk_keys_. If other rows see earlier keys, the factors of the first chunk are rotated in
  // their lanes. Their sum stays the same, because reduce_add adds by rotations.
  template <typename Function>
  void each_chunk(const Function& function) const {
    for (std::int64_t start = 0; start < sweep_.keys;) {
      const std::int64_t whole = chunk_keys_ - (sweep_.position + start) % chunk_keys_;
      const std::int64_t keys = std::min(whole, sweep_.keys - start);
      function(start, keys);
      start += keys;
    }
  }

  void clear_state(std::int64_t row) const {
    sweep_.maximum[row] = kNothing;
    sweep_.denominator[row] = 0;
    std::fill_n(sweep_.numerator[row], head_size_, 0.0F);
  }

  // Calls function.template operator()<ROWS>(row) for tiles of rows.
  template <typename Function>
  void each_tile(const Function& function) const {
    std::int64_t row = 0;
    for (; row + 4 <= sweep_.rows; row += 4) function.template operator()<4>(row);
    if (row + 2 <= sweep_.rows) {
      function.template operator()<2>(row);
      row += 2;
    }
    if (row < sweep_.rows) function.template operator()<1>(row);
  }

  // Stores the rows of a tile, KEYS scores each.
  template <int KEYS, int ROW, int... J>
  static void store_row(Vector tile, float* scores, std::integer_sequence<int, J...> /*keys*/) {
    typedef float Row __attribute__((vector_size(KEYS * sizeof(float))));
    const Row row = __builtin_shufflevector(tile, tile, (ROW * KEYS + J)...);
    std::memcpy(scores + ROW * kFewKeysMost, &row, sizeof(row));
  }
  template <int KEYS, int... ROW>
  static void store_rows(Vector tile, float* scores, std::integer_sequence<int, ROW...> /*rows*/) {
    (store_row<KEYS, ROW>(tile, scores, std::make_integer_sequence<int, KEYS>()), ...);
  }

  // Softcap and bias of one row, in place.
  void adjust(std::int64_t row, std::int64_t start, std::int64_t keys, float* scores) const {
    for (std::int64_t j = 0; j < keys; ++j) {
      if (sweep_.softcap > 0) scores[j] = sweep_.softcap * std::tanh(scores[j] / sweep_.softcap);
      if (sweep_.bias != nullptr) scores[j] += sweep_.bias[row][start + j];
    }
  }

  // Eq. 7-10 for one row: the scores become F, zero where the row does not look.
  void softmax_row(std::int64_t row, std::int64_t start, std::int64_t keys) {
    float* scores = scores_ + row * kFewKeysMost;
    if (sweep_.softcap > 0 || sweep_.bias != nullptr) adjust(row, start, keys, scores);
    // Minus infinity where the row does not look: exp makes it 0.
    const std::int64_t first = std::clamp<std::int64_t>(sweep_.first_key[row] - start, 0, keys);
    const std::int64_t last = std::clamp<std::int64_t>(sweep_.last_key[row] - start, first, keys);
    std::fill(scores, scores + first, kNothing);
    const std::int64_t padded = (keys + kLanes - 1) / kLanes * kLanes;
    std::fill(scores + last, scores + padded, kNothing);

    Vector largest = load(scores);
    for (std::int64_t j = kLanes; j < padded; j += kLanes) largest = max(largest, load(scores + j));
    const float before = sweep_.maximum[row];
    const float maximum = std::max(before, reduce_max(largest));
    // Where nothing was seen so far, or a bias of minus infinity masks all of it, any finite
    // reference makes exp(-inf - reference) 0.
    const float reference = maximum == kNothing ? 0.0F : maximum;
    Vector sum{};
    for (std::int64_t j = 0; j < padded; j += kLanes) {
      const Vector factor = exp(load(scores + j) - broadcast(reference));
      store(scores + j, factor);
      sum += factor;
    }
    corrections_[row] = std::exp(before - reference);
    sweep_.maximum[row] = maximum;
    sweep_.denominator[row] = corrections_[row] * sweep_.denominator[row] + reduce_add(sum);
  }

  const AttentionSweep& sweep_;
  const std::int64_t head_size_;
  const std::int64_t chunk_keys_;
  alignas(64) float scores_[kFewRows * kFewKeysMost];
  float corrections_[kFewRows];
};

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
