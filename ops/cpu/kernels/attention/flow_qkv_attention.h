// SPDX-License-Identifier: Apache-2.0
// FlowQKV (Gemma3 paper, section 3.1.3, eq. 6-11) with query rows in the lanes.
//
// Dataflow: queries are transposed once, so that a vector holds one element (or pair of elements)
// of kLanes rows; a block is VECTORS of them (query_blocks.h). For each chunk of keys, V (and K,
// where the cache's type is not what is multiplied) is re-ordered once, then for each block: scores
// S^T [keys][rows] from broadcast elements of K (eq. 6); mask, maximum, exp and the denominator
// vertically, without looking across lanes (eq. 7-10); and Y^T [head][rows] from broadcast elements
// of V (eq. 11). At the end Y^T is transposed back. Chunks that a block does not see are skipped;
// only scores at the edge of what it sees are masked. Caller: select.cc.
//
// The template argument Arithmetic says what is multiplied, and how: float.h, avx512.h.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>

#include "ops/cpu/kernels.h"
#include "ops/cpu/kernels/attention/cache_row.h"
#include "ops/cpu/kernels/attention/query_blocks.h"
#include "ops/cpu/kernels/functions.h"
#include "ops/cpu/kernels/vector.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// VECTORS: vectors of a block.
template <typename Arithmetic, int VECTORS>
class ManyRows {
  using A = Arithmetic;
  using Element = typename A::Element;
  using Packed = typename A::Packed;
  using Blocks = QueryBlocks<A, VECTORS>;
  static constexpr int kTile = Blocks::kTile;
  static constexpr int kBlockRows = Blocks::kRows;
  static_assert(kTile % A::kStep == 0 && kAttentionKeyStep % A::kStep == 0);
  static constexpr float kNothing = Blocks::kNothing;
  static constexpr float kLowest = std::numeric_limits<float>::lowest();

 public:
  explicit ManyRows(const AttentionSweep& sweep) : ManyRows(sweep, Parts(sweep.scratch)) {}

  std::int64_t scratch() const { return scratch_; }

  void run() {
    for (std::int64_t block = 0; block < blocks_.blocks(); ++block) blocks_.begin(block);
    for (std::int64_t start = sweep_.begin; start < sweep_.keys; start += sweep_.chunk_keys) {
      const std::int64_t end = std::min(start + sweep_.chunk_keys, sweep_.keys);
      order_values(start, end);
      for (std::int64_t block = 0; block < blocks_.blocks(); ++block) attend(block, start, end);
    }
    for (std::int64_t block = 0; block < blocks_.blocks(); ++block) blocks_.finish(block);
  }

 protected:
  ManyRows(const AttentionSweep& sweep, Parts parts)
      : sweep_(sweep),
        blocks_(sweep, parts),
        head_steps_(blocks_.head_steps()),
        padded_head_(blocks_.padded_head()),
        scores_(parts.take<float>(round_up(sweep.chunk_keys, kTile) * kBlockRows)),
        values_(parts.take<Element>(round_up(sweep.chunk_keys, kTile) / A::kStep * padded_head_)),
        keys_(
            A::converts_keys(sweep.cache_type)
                ? parts.take<Element>(round_up(sweep.chunk_keys, kTile) * (padded_head_ / A::kStep))
                : nullptr),
        scratch_(parts.used()) {}

  // The keys that some row of a block sees, [begin, end), and those that all of its rows see.
  struct Range {
    std::int64_t begin;
    std::int64_t end;
    std::int64_t all_begin;
    std::int64_t all_end;
  };

  Range range_of(std::int64_t block, std::int64_t start, std::int64_t end) const {
    const std::int32_t* first = blocks_.first(block);
    const std::int32_t* last = blocks_.last(block);
    const auto [smallest_first, largest_first] = std::minmax_element(first, first + kBlockRows);
    const auto [smallest_last, largest_last] = std::minmax_element(last, last + kBlockRows);
    Range range{std::max<std::int64_t>(start, *smallest_first),
                std::min<std::int64_t>(end, *largest_last), *largest_first, *smallest_last};
    // V is ordered in steps of keys from the chunk's start on.
    range.begin = start + (range.begin - start) / A::kStep * A::kStep;
    return range;
  }

  // Orders V of a chunk as [head / kTile][key step][kTile], which a tile of numerators reads in
  // order; and converts K, where it is not multiplied as it lies in the cache.
  void order_values(std::int64_t start, std::int64_t end) {
    const std::int64_t steps = (end - start + A::kStep - 1) / A::kStep;
    alignas(64) Element row[kMaxHeadSize + kTile] = {};
    for (std::int64_t step = 0; step < steps; ++step) {
      A::order_values(sweep_, start + step * A::kStep, end, row);
      for (std::int64_t i = 0; i < padded_head_; i += kTile) {
        std::memcpy(values_ + i * steps + step * kTile, row + i, kTile * sizeof(Element));
      }
    }
    if (keys_ == nullptr) return;
    for (std::int64_t key = start; key < end; ++key)
      A::convert_key(sweep_, key, keys_ + (key - start) * head_steps_);
  }

  const std::byte* key_row(std::int64_t key, std::int64_t start) const {
    if (keys_ != nullptr)
      return reinterpret_cast<const std::byte*>(keys_ + (key - start) * head_steps_);
    return cache_row(sweep_, sweep_.key, key);
  }

  void attend(std::int64_t block, std::int64_t start, std::int64_t end) {
    const Range range = range_of(block, start, end);
    if (range.begin >= range.end) return;
    for (std::int64_t key = range.begin; key < range.end; key += kTile) {
      score_tile(block, key, start, end, scores_ + (key - range.begin) * kBlockRows);
    }
    if (sweep_.softcap > 0 || sweep_.bias != nullptr) adjust(block, range);
    mask(block, range);
    alignas(64) float correction[kBlockRows];
    softmax(block, range, correction);
    const std::int64_t steps = (range.end - range.begin + A::kStep - 1) / A::kStep;
    const std::int64_t chunk_steps = (end - start + A::kStep - 1) / A::kStep;
    const Element* values = values_ + (range.begin - start) / A::kStep * kTile;
    for (std::int64_t i = 0; i < padded_head_; i += kTile) {
      value_tile(values + i * chunk_steps, steps, correction,
                 blocks_.numerator(block) + i * kBlockRows);
    }
  }

  // S^T of kTile keys; those past the chunk's end repeat its last one, and are masked. Not inlined,
  // so that the rows' addresses get registers. A do loop, since a head has at least one step: GCC
  // 12 keeps the sums of a loop that may not be entered in memory before and after it.
  [[gnu::noinline]] void score_tile(std::int64_t block, std::int64_t key, std::int64_t start,
                                    std::int64_t end, float* scores) const {
    const Element* query = blocks_.query(block);
    const std::byte* rows[kTile];
    for (int j = 0; j < kTile; ++j) rows[j] = key_row(std::min(key + j, end - 1), start);
    Vector sums[kTile][VECTORS];
    for (int j = 0; j < kTile; ++j) {
      for (int v = 0; v < VECTORS; ++v) sums[j][v] = Vector{};
    }
    std::int64_t step = 0;
    do {
      Packed q[VECTORS];
      for (int v = 0; v < VECTORS; ++v)
        q[v] = A::load_packed(query + (step * VECTORS + v) * kLanes);
      for (int j = 0; j < kTile; ++j) {
        const Packed k = A::broadcast_element(rows[j] + step * sizeof(Element));
        for (int v = 0; v < VECTORS; ++v) A::dot(sums[j][v], q[v], k);
      }
    } while (++step < head_steps_);
    for (int j = 0; j < kTile; ++j) {
      for (int v = 0; v < VECTORS; ++v) store(scores + (j * VECTORS + v) * kLanes, sums[j][v]);
    }
  }

  // Softcap and bias, in place. The lowest f32, which some models mask with, stays finite in units
  // of A, so that a row that sees nothing else gives its keys equal weights.
  void adjust(std::int64_t block, const Range& range) {
    for (std::int64_t key = range.begin; key < range.end; key += kLanes) {
      const std::int64_t keys = std::min<std::int64_t>(kLanes, range.end - key);
      for (int v = 0; v < VECTORS; ++v) {
        Vector bias[kLanes] = {};
        if (sweep_.bias != nullptr) bias_of(block * kBlockRows + v * kLanes, key, keys, bias);
        for (std::int64_t i = 0; i < keys; ++i) {
          float* score = scores_ + ((key - range.begin + i) * VECTORS + v) * kLanes;
          Vector s = load(score) * (1 / A::kScoreUnit);
          if (sweep_.softcap > 0) s = sweep_.softcap * tanh(s * (1 / sweep_.softcap));
          s += bias[i];
          store(score, select(s == kNothing, s, max(broadcast(kLowest), s * A::kScoreUnit)));
        }
      }
    }
  }

  // The bias of kLanes rows from `first` on, a vector for each of `keys` keys from `key` on.
  void bias_of(std::int64_t first, std::int64_t key, std::int64_t keys,
               Vector (&bias)[kLanes]) const {
    for (int r = 0; r < kLanes; ++r)
      bias[r] = load_some(sweep_.bias[std::min(first + r, sweep_.rows - 1)] + key, keys);
    transpose(bias);
  }

  // Sets scores to minus infinity for keys that a row does not see; exp makes them 0.
  void mask(std::int64_t block, const Range& range) {
    const std::int64_t stop = range.begin + round_up(range.end - range.begin, A::kStep);
    mask_keys(block, range.begin, range.begin, std::min(range.all_begin, stop));
    mask_keys(block, range.begin, std::max(range.begin, range.all_end), stop);
  }

  void mask_keys(std::int64_t block, std::int64_t begin, std::int64_t from, std::int64_t to) {
    const std::int32_t* first = blocks_.first(block);
    const std::int32_t* last = blocks_.last(block);
    for (std::int64_t key = from; key < to; ++key) {
      const Integers at = Integers{} + static_cast<std::int32_t>(key);
      for (int v = 0; v < VECTORS; ++v) {
        float* scores = scores_ + ((key - begin) * VECTORS + v) * kLanes;
        const Integers seen =
            (at >= load_integers(first + v * kLanes)) & (at < load_integers(last + v * kLanes));
        store(scores, select(seen, load(scores), broadcast(kNothing)));
      }
    }
  }

  // Eq. 7-10: the scores become F, packed as A multiplies them; `correction` is C.
  void softmax(std::int64_t block, const Range& range, float* correction) {
    const std::int64_t keys = round_up(range.end - range.begin, A::kStep);
    float* maxima = blocks_.maximum(block);
    float* denominators = blocks_.denominator(block);
    Vector maximum[VECTORS];
    for (int v = 0; v < VECTORS; ++v) maximum[v] = load(maxima + v * kLanes);
    for (std::int64_t key = 0; key < keys; ++key) {
      for (int v = 0; v < VECTORS; ++v)
        maximum[v] = max(maximum[v], load(scores_ + (key * VECTORS + v) * kLanes));
    }
    Vector sum[VECTORS];
    for (int v = 0; v < VECTORS; ++v) {
      const Vector before = load(maxima + v * kLanes);
      store(maxima + v * kLanes, maximum[v]);
      // Sets the correction to exactly 1 if the maximum stays, because A's exponential of 0 may
      // differ from 1. So keys that a row does not see do not change its state.
      const auto stays = before == maximum[v];
      // A row that has seen nothing yet has the maximum 0, since -inf - -inf is NaN.
      maximum[v] = select(maximum[v] == broadcast(kNothing), Vector{}, maximum[v]);
      store(correction + v * kLanes,
            select(stays, broadcast(1.0F), A::exponential(before - maximum[v])));
      // Sums begin at 0, as in value_tile.
      sum[v] = Vector{};
    }
    // In place: a packed step is no longer than the scores that it is made of.
    auto* factors = reinterpret_cast<Element*>(scores_);
    for (std::int64_t key = 0; key < keys; key += A::kStep) {
      for (int v = 0; v < VECTORS; ++v) {
        Vector f[A::kStep];
        for (int s = 0; s < A::kStep; ++s) {
          f[s] = A::exponential(load(scores_ + ((key + s) * VECTORS + v) * kLanes) - maximum[v]);
        }
        const Packed packed = A::pack(f);
        // The sum of the factors of the values, after rounding.
        A::dot(sum[v], packed, A::ones());
        std::memcpy(factors + (key / A::kStep * VECTORS + v) * kLanes, &packed, sizeof(packed));
      }
    }
    for (int v = 0; v < VECTORS; ++v) {
      const Vector before = load(correction + v * kLanes) * load(denominators + v * kLanes);
      store(denominators + v * kLanes, sum[v] + before);
    }
  }

  // Eq. 11 for kTile elements of the head. A chunk's sum begins at 0, and the earlier sum is added
  // at its end: that has a smaller error in float than one long sum. Not inlined, for the same
  // reason as score_tile.
  [[gnu::noinline]] void value_tile(const Element* values, std::int64_t steps,
                                    const float* correction, float* numerator) const {
    const auto* factors = reinterpret_cast<const Element*>(scores_);
    Vector y[kTile][VECTORS];
    for (int v = 0; v < VECTORS; ++v) {
      for (int i = 0; i < kTile; ++i) y[i][v] = Vector{};
    }
    std::int64_t step = 0;
    do {
      Packed f[VECTORS];
      for (int v = 0; v < VECTORS; ++v)
        f[v] = A::load_packed(factors + (step * VECTORS + v) * kLanes);
      for (int i = 0; i < kTile; ++i) {
        const Packed value = A::broadcast_element(values + step * kTile + i);
        for (int v = 0; v < VECTORS; ++v) A::dot(y[i][v], f[v], value);
      }
    } while (++step < steps);
    for (int v = 0; v < VECTORS; ++v) {
      const Vector c = load(correction + v * kLanes);
      for (int i = 0; i < kTile; ++i) {
        float* out = numerator + (i * VECTORS + v) * kLanes;
        store(out, y[i][v] + c * load(out));
      }
    }
  }

  const AttentionSweep& sweep_;
  Blocks blocks_;
  std::int64_t head_steps_;
  std::int64_t padded_head_;
  // [chunk keys][VECTORS][kLanes].
  float* scores_;
  Element* values_;
  // [chunk keys][head steps], with room for whole tiles of both; null if keys are multiplied as
  // they lie in the cache.
  Element* keys_;
  std::int64_t scratch_;
};

// The fewest rows that are a part of a prompt. Fewer are tokens that are generated, or candidates
// for them, whose bits must not depend on how many there are (FewRowsBFloat16). Matrix units pay
// from here on: their order of a chunk's values takes as long as their products of some 30 rows.
constexpr std::int64_t kPromptRows = 64;

// Calls function.template operator()<VECTORS>() with the fewest vectors that split the rows evenly
// into blocks.
template <typename Arithmetic, typename Function>
auto with_vectors(std::int64_t rows, const Function& function) {
  const std::int64_t vectors = (rows + kLanes - 1) / kLanes;
  const std::int64_t blocks = (vectors + Arithmetic::kVectors - 1) / Arithmetic::kVectors;
  const std::int64_t each = (vectors + blocks - 1) / blocks;
  if constexpr (Arithmetic::kVectors >= 4) {
    if (each == 4) return function.template operator()<4>();
    if (each == 3) return function.template operator()<3>();
  }
  if (each == 2) return function.template operator()<2>();
  return function.template operator()<1>();
}

// The most that scratch_of(sweep) returns for sweeps of up to `rows` rows. A sweep may need more if
// its number of vectors has larger tiles of keys (three vectors on AVX-512 have tiles of 5, four of
// 4), so every number of vectors is asked, and the most rows that are no part of a prompt.
template <typename Function>
std::int64_t most_scratch(std::int64_t rows, std::int64_t head_size, DataType cache_type,
                          std::int64_t chunk_keys, const Function& scratch_of) {
  AttentionSweep sweep;
  sweep.head_size = head_size;
  sweep.chunk_keys = chunk_keys;
  sweep.cache_type = cache_type;
  sweep.rows = std::min(rows, kPromptRows - 1);
  std::int64_t bytes = scratch_of(sweep);
  for (sweep.rows = rows; sweep.rows > 0; sweep.rows = (sweep.rows - 1) / kLanes * kLanes)
    bytes = std::max(bytes, scratch_of(sweep));
  return bytes;
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
