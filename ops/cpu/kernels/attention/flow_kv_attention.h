// SPDX-License-Identifier: Apache-2.0
// FlowKV (Gemma3 paper, section 3.2.2, eq. 6-11) with elements of the head in the lanes: for so few
// rows, the heads of a group in decode, that reading K and V takes the time.
//
// Dataflow, for each chunk of keys: scores S = Q K^T (eq. 6) tile by tile; then row by row the
// mask, the new maximum m (eq. 7), F = exp(S - m) (eq. 8) in place, the correction C = exp(m_left -
// m) (eq. 9) and the denominator (eq. 10); then Y = C Y_left + F V (eq. 11). K and V are read as
// they lie in the cache, once for all rows, and converted in registers, bf16 two vectors at a time:
// those with even indices, then those with odd ones; all arithmetic is f32.
// While keys are scored, their values are prefetched, and while values are added, the next keys;
// and what is about to be used once more, for a core that has asked for as much as it can keep
// track of drops what else it is asked to prefetch.
// Caller: ops/cpu/attention/flow_qkv_attention.cc.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "ops/cpu/kernels.h"
#include "ops/cpu/kernels/vector.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// As many rows as a tile's scores have registers for when it is passed twice over the keys in L1;
// with more, attend_many multiplies less.
constexpr std::int64_t kFewRows = 8;
// Keys of a chunk: 16 KB of them, 32 of 256 bf16, so that they and their values lie in L1 (32 to
// 48 KB); more of shorter keys, since each chunk ends in sums across the lanes.
constexpr std::int64_t kFewKeysBytes = 16 * 1024;
// How far ahead keys and values are prefetched once more. In L1 they are computed with at 45 to 60
// GB/s, memory answers a core at 35: so up to a third of what is prefetched a chunk ahead is
// dropped, and each such line would be waited for. 4 KB take some 100 ns, which is what a line
// takes. With both, two threads of a Zen 5 read 1055 keys at 0.96 of the pure rate where it was
// 0.84 (2 rows of 128; 4 rows of 64: 0.93 and 0.89, 4 rows of 256: 0.85 and 0.72). 2 KB and 8 KB
// ahead were a few percent slower.
constexpr std::int64_t kSoonBytes = 4 * 1024;
constexpr std::int64_t kFewKeysLeast = 32;
constexpr std::int64_t kFewKeysMost = 256;
constexpr int kCacheLine = 64;

// A tile of scores is ROWS rows x kLanes / ROWS keys, a vector of partial sums each: as many as a
// vector has lanes, so that one tree sums them across lanes (16 of 32 registers with AVX-512, 8 of
// 16 with AVX2).
//
// A tile of values is ROWS rows x kTileVectors / ROWS vectors of numerators: half of the registers
// too; 8 keep two multipliers with a latency of 4 cycles busy.
constexpr int kTileVectors = kLanes == 16 ? 16 : 8;

// Where lane `lane` of what is added comes from, in a (0 .. kLanes - 1) or b (from kLanes on): with
// DISTANCE 1 and 2 from the same four lanes, which processors move around faster than any others;
// beyond, from groups of four. `odd`: the second addend.
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

template <int DISTANCE, int... I>
inline Vector add_pairs(Vector a, Vector b, std::integer_sequence<int, I...> /*lanes*/) {
  return __builtin_shufflevector(a, b, addend<DISTANCE>(I, 0)...) +
         __builtin_shufflevector(a, b, addend<DISTANCE>(I, 1)...);
}

// Lane i of the result is the sum over the lanes of sums[i].
template <int COUNT>
inline Vector sum_each(const Vector (&sums)[COUNT]) {
  if constexpr (COUNT == 1) {
    return sums[0];
  } else {
    Vector half[COUNT / 2];  // Unrolled, or GCC keeps it and `sums` in memory.
#pragma GCC unroll 8
    for (int i = 0; i < COUNT / 2; ++i) {
      half[i] = add_pairs<kLanes / COUNT>(sums[2 * i], sums[2 * i + 1],
                                          std::make_integer_sequence<int, kLanes>());
    }
    return sum_each(half);
  }
}

template <typename Type>
class FewRows {
  using Element = typename Type::Element;
  static constexpr int kLineElements = kCacheLine / sizeof(Element);
  static constexpr std::int64_t kSoon = kSoonBytes / sizeof(Element);
  static constexpr float kNothing = -std::numeric_limits<float>::infinity();

 public:
  explicit FewRows(const AttentionSweep& sweep)
      : sweep_(sweep),
        head_size_(sweep.head_size),
        keys_(static_cast<const Element*>(sweep.key)),
        values_(static_cast<const Element*>(sweep.value)),
        chunk_keys_(std::clamp(kFewKeysBytes /
                                   (sweep.head_size * static_cast<std::int64_t>(sizeof(Element))) /
                                   kAttentionKeyStep * kAttentionKeyStep,
                               kFewKeysLeast, kFewKeysMost)) {}

  void run() {
    for (std::int64_t r = 0; r < sweep_.rows; ++r) {
      sweep_.maximum[r] = kNothing;
      sweep_.denominator[r] = 0;
      std::fill_n(sweep_.numerator[r], head_size_, 0.0F);
      float* query = query_ + r * head_size_;
      std::copy_n(sweep_.query + r * head_size_, head_size_, query);
      rearrange(query, [](TwoVectors v) { return even_and_odd(v); });
    }
    for (std::int64_t start = 0; start < sweep_.keys; start += chunk_keys_)
      attend(start, std::min(chunk_keys_, sweep_.keys - start));
    for (std::int64_t r = 0; r < sweep_.rows; ++r)
      rearrange(sweep_.numerator[r], [](TwoVectors v) { return in_turn(v); });
  }

 private:
  // Queries and numerators lie in the order in which load_two has the elements of K and V.
  template <typename Order>
  void rearrange(float* head, const Order& order) const {
    if constexpr (Type::kEvenAndOdd) {
      for (std::int64_t i = 0; i + 2 * kLanes <= head_size_; i += 2 * kLanes) {
        const TwoVectors v = order({load(head + i), load(head + i + kLanes)});
        store(head + i, v.first);
        store(head + i + kLanes, v.second);
      }
    }
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

  void attend(std::int64_t start, std::int64_t keys) {
    each_tile([&]<int ROWS>(std::int64_t row) {
      constexpr int kKeys = kLanes / ROWS;
      for (std::int64_t key = 0; key < keys; key += kKeys)
        score_tile<ROWS, kKeys>(row, start + key, start + keys, scores_ + key);
    });
    for (std::int64_t row = 0; row < sweep_.rows; ++row) softmax_row(row, start, keys);
    each_tile([&]<int ROWS>(std::int64_t row) { value_rows<ROWS>(row, start, keys); });
  }

  // The scalar product of the elements from `from` on.
  float dot(const float* query, const Element* key, std::int64_t from) const {
    Vector sums{};
    std::int64_t i = from;
    for (; i + kLanes <= head_size_; i += kLanes)
      sums += load(query + i) * Type::load_vector(key + i);
    float sum = reduce_add(sums);
    for (; i < head_size_; ++i) sum += query[i] * Type::load_one(key + i);
    return sum;
  }

  // As much as VECTORS vectors hold; returns where that ends.
  template <int VECTORS>
  static const Element* prefetch(const Element* x) {
    for (int i = 0; i < VECTORS * kLanes; i += kLineElements) __builtin_prefetch(x + i);
    return x + VECTORS * kLanes;
  }

  // A tile's rows of KEYS scores.
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

  // scores[row][key] for ROWS rows from `row`, KEYS keys from `key`. Keys past the end repeat the
  // last one; their results are not kept.
  template <int ROWS, int KEYS>
  void score_tile(std::int64_t row, std::int64_t key, std::int64_t end, float* scores) const {
    const std::int64_t d = head_size_;
    const float* query = query_ + row * d;
    const Element* cached[KEYS];
    cached[0] = keys_ + key * d;
    for (int j = 1; j < KEYS; ++j) cached[j] = cached[j - 1] + (key + j < end ? d : 0);
    const Element* ahead = values_ + key * d;
    const Element* soon = cached[0] + kSoon;

    // Unrolled, or GCC keeps the sums in memory.
    Vector sums[kLanes];
#pragma GCC unroll 16
    for (Vector& sum : sums) sum = Vector{};
    std::int64_t i = 0;
    for (; i + 2 * kLanes <= d; i += 2 * kLanes) {
      TwoVectors q[ROWS];
      for (int r = 0; r < ROWS; ++r)
        q[r] = {load(query + r * d + i), load(query + r * d + i + kLanes)};
      for (int j = 0; j < KEYS; ++j) {
        ahead = prefetch<2>(ahead);
        soon = prefetch<2>(soon);
        const TwoVectors k = Type::load_two(cached[j] + i);
        for (int r = 0; r < ROWS; ++r) {
          sums[r * KEYS + j] += q[r].first * k.first;
          sums[r * KEYS + j] += q[r].second * k.second;
        }
      }
    }
    Vector tile = sum_each(sums);
    if (i < d) {
      float rest[kLanes];
      for (int lane = 0; lane < kLanes; ++lane)
        rest[lane] = dot(query + lane / KEYS * d, cached[lane % KEYS], i);
      tile += load(rest);
    }
    store_rows<KEYS>(tile, scores + row * kFewKeysMost, std::make_integer_sequence<int, ROWS>());
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
    // Nothing seen so far, or all of it masked away by a bias of minus infinity: any finite
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

  // Eq. 11 for ROWS rows from `row`, VECTORS vectors of the head from element `i`.
  template <int ROWS, int VECTORS>
  void value_tile(std::int64_t row, std::int64_t start, std::int64_t keys, std::int64_t i) const {
    const Element* values = values_ + start * head_size_ + i;
    // From 0, and what was there is added at the end: of many keys a sum in float of few numbers a
    // chunk, then of few chunks, is off by less than one of all, one after the other.
    Vector y[ROWS][VECTORS];
    for (int r = 0; r < ROWS; ++r) {
      for (int v = 0; v < VECTORS; ++v) y[r][v] = Vector{};
    }
    // Whole rows, so that tiles of some of their elements fetch those.
    const std::int64_t soon = std::max(kSoon / head_size_, std::int64_t{1}) * head_size_;
    // The next keys, in the order they lie in: a part of them for each tile.
    const Element* next =
        keys_ + std::min(start + keys, sweep_.keys - keys) * head_size_ + i * keys;
    for (std::int64_t j = 0; j < keys; ++j) {
      next = prefetch<VECTORS>(next);
      prefetch<VECTORS>(values + j * head_size_ + soon);
      Vector value[VECTORS];
      load_values(values + j * head_size_, value);
      for (int r = 0; r < ROWS; ++r) {
        const Vector f = broadcast(scores_[(row + r) * kFewKeysMost + j]);
        for (int v = 0; v < VECTORS; ++v) y[r][v] += f * value[v];
      }
    }
    for (int r = 0; r < ROWS; ++r) {
      for (int v = 0; v < VECTORS; ++v) {
        float* numerator = sweep_.numerator[row + r] + i + v * kLanes;
        store(numerator, y[r][v] + corrections_[row + r] * load(numerator));
      }
    }
  }

  // Two by two, or the one that is left.
  template <int VECTORS>
  static void load_values(const Element* x, Vector (&value)[VECTORS]) {
    if constexpr (VECTORS == 1) {
      value[0] = Type::load_vector(x);
    } else {
      for (int v = 0; v < VECTORS; v += 2) {
        const TwoVectors two = Type::load_two(x + v * kLanes);
        value[v] = two.first;
        value[v + 1] = two.second;
      }
    }
  }

  // From element `i` on, in tiles of VECTORS vectors while they fit the head, then of half as many,
  // down to one; returns where they end.
  template <int ROWS, int VECTORS>
  std::int64_t value_tiles(std::int64_t row, std::int64_t start, std::int64_t keys,
                           std::int64_t i) const {
    for (; i + VECTORS * kLanes <= head_size_; i += VECTORS * kLanes)
      value_tile<ROWS, VECTORS>(row, start, keys, i);
    if constexpr (VECTORS > 1) return value_tiles<ROWS, VECTORS / 2>(row, start, keys, i);
    return i;
  }

  template <int ROWS>
  void value_rows(std::int64_t row, std::int64_t start, std::int64_t keys) const {
    const std::int64_t d = head_size_;
    std::int64_t i = value_tiles<ROWS, kTileVectors / ROWS>(row, start, keys, 0);
    for (; i < d; ++i) {
      for (int r = 0; r < ROWS; ++r) {
        float y = 0;
        for (std::int64_t j = 0; j < keys; ++j) {
          y +=
              scores_[(row + r) * kFewKeysMost + j] * Type::load_one(values_ + (start + j) * d + i);
        }
        float& numerator = sweep_.numerator[row + r][i];
        numerator = y + corrections_[row + r] * numerator;
      }
    }
  }

  const AttentionSweep& sweep_;
  const std::int64_t head_size_;
  const Element* keys_;
  const Element* values_;
  const std::int64_t chunk_keys_;
  alignas(64) float query_[kFewRows * kMaxHeadSize];
  alignas(64) float scores_[kFewRows * kFewKeysMost];
  float corrections_[kFewRows];
};

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
