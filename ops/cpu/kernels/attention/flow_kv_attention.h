// SPDX-License-Identifier: Apache-2.0
// FlowKV (Gemma3 paper, section 3.2.2, eq. 6-11) with elements of the head in the lanes. It is for
// the few rows of a group's heads in decode, when reading K and V takes most of the time.
//
// Dataflow, for each chunk of keys: scores S = Q K^T (eq. 6) tile by tile; then row by row the
// mask, the new maximum m (eq. 7), F = exp(S - m) (eq. 8) in place, the correction C = exp(m_left -
// m) (eq. 9) and the denominator (eq. 10); then Y = C Y_left + F V (eq. 11). K and V are read as
// they lie in the cache, once for all rows, and converted in registers, bf16 two vectors at a time:
// elements with even indices, then those with odd ones; all arithmetic is f32. While keys are
// scored, their values are prefetched, and while values are added, the next keys. Data that is
// needed soon is prefetched once more, because a core that already tracks as many requests as it
// can drops further prefetches. Caller: select.cc.
#pragma once

#include <algorithm>

#include "ops/cpu/kernels.h"
#include "ops/cpu/kernels/attention/few_row_scores.h"
#include "ops/cpu/kernels/vector.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

template <typename Type>
class FewRows : FewRowScores {
  using Element = typename Type::Element;
  static constexpr int kLineElements = kCacheLine / sizeof(Element);

 public:
  explicit FewRows(const AttentionSweep& sweep)
      : FewRowScores(sweep, sizeof(Element)),
        keys_(static_cast<const Element*>(sweep.key)),
        values_(static_cast<const Element*>(sweep.value)),
        soon_(few_keys().soon_bytes / static_cast<std::int64_t>(sizeof(Element))) {}

  void run() {
    for (std::int64_t r = 0; r < sweep_.rows; ++r) {
      clear_state(r);
      float* query = query_ + r * head_size_;
      std::copy_n(sweep_.query + r * head_size_, head_size_, query);
      rearrange(query, [](TwoVectors v) { return even_and_odd(v); });
    }
    each_chunk([&](std::int64_t start, std::int64_t keys) { attend(start, keys); });
    for (std::int64_t r = 0; r < sweep_.rows; ++r)
      rearrange(sweep_.numerator[r], [](TwoVectors v) { return in_turn(v); });
  }

 private:
  // Queries and numerators lie in the order in which load_two returns the elements of K and V.
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

  // Prefetches as many elements as VECTORS vectors hold; returns where they end.
  template <int VECTORS>
  static const Element* prefetch(const Element* x) {
    for (int i = 0; i < VECTORS * kLanes; i += kLineElements) __builtin_prefetch(x + i);
    return x + VECTORS * kLanes;
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
    const Element* soon = cached[0] + soon_;

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

  // Eq. 11 for ROWS rows from `row`, VECTORS vectors of the head from element `i`.
  template <int ROWS, int VECTORS>
  void value_tile(std::int64_t row, std::int64_t start, std::int64_t keys, std::int64_t i) const {
    const Element* values = values_ + start * head_size_ + i;
    // A chunk's sum begins at 0, and the earlier sum is added at its end. Short sums within chunks
    // and then over chunks have a smaller error in float than one long sum.
    Vector y[ROWS][VECTORS];
    for (int r = 0; r < ROWS; ++r) {
      for (int v = 0; v < VECTORS; ++v) y[r][v] = Vector{};
    }
    // Whole rows ahead, so that a tile of some of a row's elements prefetches the same elements.
    const std::int64_t soon = std::max(soon_ / head_size_, std::int64_t{1}) * head_size_;
    // The keys of the next chunk, in the order they lie in memory: each tile prefetches a part of
    // them.
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

  // Loads vectors two by two, or a single one.
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

  // Adds values from element `i` on, in tiles of VECTORS vectors while they fit the head, then of
  // half as many, down to one; returns where they end.
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

  const Element* keys_;
  const Element* values_;
  // How many elements ahead keys and values are prefetched once more.
  const std::int64_t soon_;
  alignas(64) float query_[kFewRows * kMaxHeadSize];
};

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
