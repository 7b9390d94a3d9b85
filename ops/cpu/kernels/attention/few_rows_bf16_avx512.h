// SPDX-License-Identifier: Apache-2.0
// FlowQKV (flow_qkv_attention.h) over a bf16 cache with AVX-512, for so few rows that they would
// not fill a vector: the heads of a group in decode. It gives the same bits as ManyRows for the
// same rows: each sum adds the same products in the same order.
//
// Dataflow, for each chunk of keys: K of 32 keys is transposed, so that a vector holds one pair of
// elements of 16 keys, and multiplied by broadcast pairs of the queries (eq. 6); scores are
// transposed so that rows are in the lanes, as ManyRows' softmax takes them (eq. 7-10); pairs of
// V's rows are interleaved in registers, elements of the head in the lanes, and multiplied by
// broadcast pairs of F (eq. 11). While keys are scored, their values are prefetched, and while
// values are added, the keys of the next chunk. Numerators [rows][head] stay in the order that
// interleaving leaves until the end. Caller: select.cc.
#pragma once

#include <immintrin.h>

#include <algorithm>

#include "ops/cpu/kernels/attention/avx512.h"
#include "ops/cpu/kernels/attention/flow_qkv_attention.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

class FewRowsBFloat16 : ManyRows<BFloat16Pairs, 1> {
  using A = BFloat16Pairs;
  using Base = ManyRows<A, 1>;
  // Rows of a tile. Each row takes two vectors of scores, or four of numerators, and some registers
  // must remain for the factors. 8 sums hide the latency of a product.
  static constexpr int kRowTile = 4;
  static constexpr int kKeys = 2 * kLanes;
  static constexpr int kHeadTile = 4 * kLanes;
  static constexpr std::int64_t kPairBytes = 4;
  static constexpr std::int64_t kMostChunkKeys = 128;

 public:
  // Whether there are few enough rows, whole vectors of pairs, and whole groups of keys.
  static bool takes(const AttentionSweep& sweep) {
    return sweep.rows <= 8 && sweep.head_size % (2 * kLanes) == 0 &&
           sweep.chunk_keys % kKeys == 0 && sweep.chunk_keys <= kMostChunkKeys;
  }

  explicit FewRowsBFloat16(const AttentionSweep& sweep) : Base(sweep), d_(sweep.head_size) {}

  void run() {
    blocks_.begin(0);
    for (std::int64_t start = sweep_.begin; start < sweep_.keys; start += sweep_.chunk_keys)
      attend(start, std::min(start + sweep_.chunk_keys, sweep_.keys));
    finish();
  }

 private:
  void attend(std::int64_t start, std::int64_t end) {
    const Range range = range_of(0, start, end);
    if (range.begin >= range.end) return;
    for (std::int64_t key = range.begin; key < range.end; key += kKeys)
      score(key, end, scores_ + (key - range.begin) * kLanes);
    if (sweep_.softcap > 0 || sweep_.bias != nullptr) adjust(0, range);
    mask(0, range);
    alignas(64) float correction[kLanes];
    softmax(0, range, correction);
    add_values(range, end, correction);
  }

  // Scores of kKeys keys, [key][kLanes rows]; those past the end repeat the last one.
  void score(std::int64_t key, std::int64_t end, float* scores) {
    // [head step][kKeys], in the memory for a chunk's ordered values, which are not needed here.
    auto* keys = reinterpret_cast<float*>(values_);
    for (std::int64_t half = 0; half < kKeys; half += kLanes) {
      const std::byte* rows[kLanes];
      const std::byte* values[kLanes];
      for (int j = 0; j < kLanes; ++j) {
        const std::int64_t at = std::min(key + half + j, end - 1);
        rows[j] = cache_row(sweep_, sweep_.key, at);
        values[j] = cache_row(sweep_, sweep_.value, at);
      }
      for (std::int64_t step = 0; step < head_steps_; step += kLanes) {
        Vector square[kLanes];
        for (int j = 0; j < kLanes; ++j) {
          square[j] = _mm512_loadu_ps(rows[j] + step * kPairBytes);
          __builtin_prefetch(values[j] + step * kPairBytes);
        }
        transpose(square);
        for (int s = 0; s < kLanes; ++s) store(keys + (step + s) * kKeys + half, square[s]);
      }
    }
    Vector squares[2][kLanes] = {};
    for (std::int64_t row = 0; row < sweep_.rows; row += kRowTile)
      dot_keys(keys, row, squares[0] + row, squares[1] + row);
    for (int half = 0; half < 2; ++half) {
      transpose(squares[half]);
      for (int j = 0; j < kLanes; ++j)
        store(scores + (half * kLanes + j) * kLanes, squares[half][j]);
    }
  }

  // Scores of kRowTile rows from `row` on, by key. Rows past the last one are copies of it, or 0.
  void dot_keys(const float* keys, std::int64_t row, Vector* low, Vector* high) const {
    const std::uint32_t* query = blocks_.query(0) + row;
    Vector sums[kRowTile][2] = {};
    for (std::int64_t step = 0; step < head_steps_; ++step) {
      const __m512i k0 = _mm512_castps_si512(load(keys + step * kKeys));
      const __m512i k1 = _mm512_castps_si512(load(keys + step * kKeys + kLanes));
      for (int r = 0; r < kRowTile; ++r) {
        const __m512i q = A::broadcast_element(query + step * kLanes + r);
        A::dot(sums[r][0], q, k0);
        A::dot(sums[r][1], q, k1);
      }
    }
    for (int r = 0; r < kRowTile; ++r) {
      low[r] = sums[r][0];
      high[r] = sums[r][1];
    }
  }

  void add_values(const Range& range, std::int64_t end, const float* correction) {
    // V's rows, two by two; past `end` the last row is repeated, and its factor there is 0.
    const std::byte* rows[kMostChunkKeys];
    const std::byte* next[kMostChunkKeys];
    const std::int64_t steps = (range.end - range.begin + 1) / 2;
    for (std::int64_t i = 0; i < 2 * steps; ++i) {
      rows[i] = cache_row(sweep_, sweep_.value, std::min(range.begin + i, end - 1));
      next[i] = cache_row(sweep_, sweep_.key, std::min(end + i, sweep_.keys - 1));
    }
    for (std::int64_t row = 0; row < sweep_.rows; row += kRowTile) {
      std::int64_t i = 0;
      for (; i + kHeadTile <= d_; i += kHeadTile)
        value_tile<2>(rows, next, steps, row, i, correction);
      if (i < d_) value_tile<1>(rows, next, steps, row, i, correction);
    }
  }

  // COUNT times 2 kLanes elements of the head from element `i` on, of kRowTile rows.
  template <int COUNT>
  void value_tile(const std::byte* const* rows, const std::byte* const* next, std::int64_t steps,
                  std::int64_t row, std::int64_t i, const float* correction) {
    const auto* factors = reinterpret_cast<const std::uint32_t*>(scores_) + row;
    Vector y[kRowTile][2 * COUNT] = {};
    for (std::int64_t step = 0; step < steps; ++step) {
      __m512i values[2 * COUNT];
      for (int c = 0; c < COUNT; ++c) {
        const std::int64_t at = (i + c * 2 * kLanes) * 2;
        const __m512i low = _mm512_loadu_si512(rows[2 * step] + at);
        const __m512i high = _mm512_loadu_si512(rows[2 * step + 1] + at);
        __builtin_prefetch(next[2 * step] + at);
        __builtin_prefetch(next[2 * step + 1] + at);
        values[2 * c] = _mm512_unpacklo_epi16(low, high);
        values[2 * c + 1] = _mm512_unpackhi_epi16(low, high);
      }
      for (int r = 0; r < kRowTile; ++r) {
        const __m512i f = A::broadcast_element(factors + step * kLanes + r);
        for (int v = 0; v < 2 * COUNT; ++v) A::dot(y[r][v], f, values[v]);
      }
    }
    for (int r = 0; r < kRowTile && row + r < sweep_.rows; ++r) {
      const Vector c = broadcast(correction[row + r]);
      for (int v = 0; v < 2 * COUNT; ++v) {
        float* out = blocks_.numerator(0) + (row + r) * d_ + i + v * kLanes;
        store(out, y[r][v] + c * load(out));
      }
    }
  }

  // Writes the state to the sweep, with the numerators' elements in their own order.
  void finish() const {
    for (std::int64_t r = 0; r < sweep_.rows; ++r) {
      sweep_.maximum[r] = blocks_.maximum(0)[r] / A::kScoreUnit;
      sweep_.denominator[r] = blocks_.denominator(0)[r];
      const float* from = blocks_.numerator(0) + r * d_;
      for (std::int64_t i = 0; i < d_; i += 2 * kLanes) {
        const Vector low = load(from + i);
        const Vector high = load(from + i + kLanes);
        store(sweep_.numerator[r] + i, __builtin_shufflevector(low, high, 0, 1, 2, 3, 16, 17, 18,
                                                               19, 4, 5, 6, 7, 20, 21, 22, 23));
        store(sweep_.numerator[r] + i + kLanes,
              __builtin_shufflevector(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28,
                                      29, 30, 31));
      }
    }
  }

  std::int64_t d_;
};

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
