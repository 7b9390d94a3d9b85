// SPDX-License-Identifier: Apache-2.0
// FlowKV (flow_kv_attention.h) over an int8 cache (int8_row.h), for so few rows that reading K and
// V takes most of the time. It computes in integers, with a half or a quarter of the instructions
// that conversion to float would take.
//
// Dataflow, for each chunk of keys: S' = Q' K'^T with the cache's codes K' and queries rounded to
// Q' of 15 bits, scale max|q| / 32767 for each; products and their sums are exact in 32 bits. S =
// S' times the query's and the key's scale (eq. 6); then softmax (eq. 7-10). F times the scales of
// V's rows is rounded to 15 bits of the chunk's largest factor. Its products with the codes of V
// are again exact, and are added to the numerators in float (eq. 11). Rounding the queries moves a
// score by less than 2^-16 max|q| sum|k|; rounding F moves an element of a chunk's sum by less than
// 2^-16 of the chunk's largest factor times the sum of the keys' |codes|. All instruction sets
// compute the same integers. Caller: select.cc.
#pragma once

#include <algorithm>
#include <cstring>

#include "ops/cpu/kernels.h"
#include "ops/cpu/kernels/attention/few_row_scores.h"
#include "ops/cpu/kernels/int8_row.h"
#include "ops/cpu/kernels/vector.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// The factors of a product: vectors of int16, two for each lane.
constexpr int kInt16Lanes = 2 * kLanes;
typedef std::int16_t Int16Vector __attribute__((vector_size(kInt16Lanes * 2)));

inline Int16Vector load_int16(const std::int16_t* x) {
  Int16Vector v;
  std::memcpy(&v, x, sizeof(v));
  return v;
}

inline Int16Vector broadcast_pair(const std::int16_t* x) {
  std::int32_t pair;
  std::memcpy(&pair, x, sizeof(pair));
  return reinterpret_cast<Int16Vector>(Integers{} + pair);
}

inline Int16Vector widen(const std::int8_t* x) {
#if defined(__AVX512F__)
  return reinterpret_cast<Int16Vector>(
      _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))));
#elif defined(__AVX2__)
  return reinterpret_cast<Int16Vector>(
      _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))));
#else
  typedef std::int8_t Codes __attribute__((vector_size(kInt16Lanes)));
  Codes codes;
  std::memcpy(&codes, x, sizeof(codes));
  return __builtin_convertvector(codes, Int16Vector);
#endif
}

// sum + a0 b0 + a1 b1, in each lane.
inline Integers add_products(Integers sum, Int16Vector a, Int16Vector b) {
#if defined(__AVX512VNNI__)
  return reinterpret_cast<Integers>(_mm512_dpwssd_epi32(
      reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return sum + reinterpret_cast<Integers>(
                   _mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#else
  const auto x = reinterpret_cast<Integers>(a);
  const auto y = reinterpret_cast<Integers>(b);
  return sum + (x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16);
#endif
}

struct TwoWords {
  Int16Vector first;
  Int16Vector second;
};

// Pairs (a[i], b[i]) of kInt16Lanes elements. With AVX-512 they are not in the order of i;
// in_order() restores it in the sums.
inline TwoWords pairs_of(const std::int8_t* a, const std::int8_t* b) {
#if defined(__AVX512F__)
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a));
  const __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b));
  return {reinterpret_cast<Int16Vector>(_mm512_cvtepi8_epi16(_mm256_unpacklo_epi8(x, y))),
          reinterpret_cast<Int16Vector>(_mm512_cvtepi8_epi16(_mm256_unpackhi_epi8(x, y)))};
#elif defined(__AVX2__)
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(a));
  const __m128i y = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b));
  return {reinterpret_cast<Int16Vector>(_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(x, y))),
          reinterpret_cast<Int16Vector>(_mm256_cvtepi8_epi16(_mm_unpackhi_epi8(x, y)))};
#else
  const Int16Vector x = widen(a);
  const Int16Vector y = widen(b);
  return {__builtin_shufflevector(x, y, 0, 8, 1, 9, 2, 10, 3, 11),
          __builtin_shufflevector(x, y, 4, 12, 5, 13, 6, 14, 7, 15)};
#endif
}

inline TwoVectors in_order(TwoVectors v) {
#if defined(__AVX512F__)
  return {__builtin_shufflevector(v.first, v.second, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21,
                                  22, 23),
          __builtin_shufflevector(v.first, v.second, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27,
                                  28, 29, 30, 31)};
#else
  return v;
#endif
}

class FewRowsInt8 : FewRowScores {
  static constexpr float kLargest = 32767.0F;
  // Below this largest magnitude, the scale of a query or of factors is not a normal number, and
  // its inverse is not finite.
  static constexpr float kSmallest = 1e-30F;

 public:
  explicit FewRowsInt8(const AttentionSweep& sweep)
      : FewRowScores(sweep, sizeof(std::int8_t)),
        keys_(static_cast<const std::int8_t*>(sweep.key)),
        values_(static_cast<const std::int8_t*>(sweep.value)),
        row_(sweep.row_bytes),
        whole_(head_size_ / kInt16Lanes * kInt16Lanes) {}

  void run() {
    for (std::int64_t r = 0; r < sweep_.rows; ++r) {
      clear_state(r);
      query_scales_[r] =
          round_to_words(sweep_.query + r * head_size_, query_ + r * kMaxHeadSize, head_size_);
    }
    each_chunk([&](std::int64_t start, std::int64_t keys) { attend(start, keys); });
    for (std::int64_t r = 0; r < sweep_.rows; ++r) put_in_order(sweep_.numerator[r]);
  }

 private:
  // n elements as int16; returns their scale, NaN if one is not finite.
  static float round_to_words(const float* x, std::int16_t* words, std::int64_t n) {
    const float largest = largest_magnitude(x, n);
    const bool counts = largest >= kSmallest && largest <= std::numeric_limits<float>::max();
    const float inverse = counts ? kLargest / largest : 0.0F;
    typedef std::int16_t Half __attribute__((vector_size(kLanes * 2)));
    std::int64_t i = 0;
    for (; i < n; i += kLanes) {
      const std::int64_t count = std::min<std::int64_t>(kLanes, n - i);
      Vector scaled = round_to_integer(load_some(x + i, count) * inverse);
      if (!counts) scaled = Vector{};
      const Half half = __builtin_convertvector(__builtin_convertvector(scaled, Integers), Half);
      std::memcpy(words + i, &half, static_cast<std::size_t>(count) * sizeof(std::int16_t));
    }
    return counts ? largest / kLargest : largest < kSmallest ? 0.0F : largest - largest;
  }

  void attend(std::int64_t start, std::int64_t keys) {
    each_tile([&]<int ROWS>(std::int64_t row) {
      constexpr int kKeys = kLanes / ROWS;
      for (std::int64_t key = 0; key < keys; key += kKeys)
        score_tile<ROWS, kKeys>(row, start + key, start + keys, scores_ + key);
    });
    gather_scales(keys_, start, keys);
    for (std::int64_t row = 0; row < sweep_.rows; ++row) {
      float* scores = scores_ + row * kFewKeysMost;
      multiply(scores, keys, query_scales_[row]);
      softmax_row(row, start, keys);
    }
    gather_scales(values_, start, keys);
    for (std::int64_t row = 0; row < sweep_.rows; ++row) {
      float* scores = scores_ + row * kFewKeysMost;
      multiply(scores, keys, 1.0F);
      factor_scales_[row] = round_to_words(scores, factors_ + row * kFewKeysMost, keys);
      // The other half of the pair that an odd last key begins.
      if (keys % 2 != 0) factors_[row * kFewKeysMost + keys] = 0;
    }
    each_tile([&]<int ROWS>(std::int64_t row) { value_rows<ROWS>(row, start, keys); });
  }

  void gather_scales(const std::int8_t* rows, std::int64_t start, std::int64_t keys) {
    for (std::int64_t j = 0; j < keys; ++j)
      scales_[j] = int8_row_scale(rows + (start + j) * row_, head_size_);
    // multiply() takes whole vectors.
    std::fill_n(scales_ + keys, round_up_to_lanes(keys) - keys, 0.0F);
  }

  static std::int64_t round_up_to_lanes(std::int64_t n) {
    return (n + kLanes - 1) / kLanes * kLanes;
  }

  void multiply(float* scores, std::int64_t keys, float scale) const {
    for (std::int64_t j = 0; j < keys; j += kLanes)
      store(scores + j, load(scores + j) * (load(scales_ + j) * scale));
  }

  // The scalar product of the elements from `from` on.
  std::int32_t dot(const std::int16_t* query, const std::int8_t* key, std::int64_t from) const {
    std::int32_t sum = 0;
    for (std::int64_t i = from; i < head_size_; ++i) sum += query[i] * key[i];
    return sum;
  }

  static const std::int8_t* prefetch(const std::int8_t* x) {
    __builtin_prefetch(x);
    return x + kCacheLine;
  }

  // scores[row][key] in units of the query's scale times the key's, for ROWS rows from `row`, KEYS
  // keys from `key`. Keys past the end repeat the last one; their results are not kept. 512
  // products of 15 and 7 bits are below 2^31.
  template <int ROWS, int KEYS>
  void score_tile(std::int64_t row, std::int64_t key, std::int64_t end, float* scores) const {
    const std::int16_t* query = query_ + row * kMaxHeadSize;
    const std::int8_t* cached[KEYS];
    cached[0] = keys_ + key * row_;
    for (int j = 1; j < KEYS; ++j) cached[j] = cached[j - 1] + (key + j < end ? row_ : 0);
    const std::int8_t* ahead = values_ + key * row_;
    const std::int8_t* soon = cached[0] + few_keys().soon_bytes;

    // Unrolled, or GCC keeps the sums in memory.
    Integers sums[kLanes];
#pragma GCC unroll 16
    for (Integers& sum : sums) sum = Integers{};
    for (std::int64_t i = 0; i < whole_; i += kInt16Lanes) {
      Int16Vector q[ROWS];
      for (int r = 0; r < ROWS; ++r) q[r] = load_int16(query + r * kMaxHeadSize + i);
      for (int j = 0; j < KEYS; ++j) {
        // A cache line holds the codes of 64 / kInt16Lanes of these steps.
        if (j % (kCacheLine / kInt16Lanes) == 0) {
          ahead = prefetch(ahead);
          soon = prefetch(soon);
        }
        const Int16Vector k = widen(cached[j] + i);
        for (int r = 0; r < ROWS; ++r)
          sums[r * KEYS + j] = add_products(sums[r * KEYS + j], q[r], k);
      }
    }
    Integers tile = sum_each(sums);
    if (whole_ < head_size_) {
      std::int32_t rest[kLanes];
      for (int lane = 0; lane < kLanes; ++lane)
        rest[lane] = dot(query + lane / KEYS * kMaxHeadSize, cached[lane % KEYS], whole_);
      tile += load_integers(rest);
    }
    store_rows<KEYS>(__builtin_convertvector(tile, Vector), scores + row * kFewKeysMost,
                     std::make_integer_sequence<int, ROWS>());
  }

  // Eq. 11 for ROWS rows from `row`, VECTORS vectors of the head from element `i`: a sum of 256
  // products of 15 and 7 bits is below 2^31.
  template <int ROWS, int VECTORS>
  void value_tile(std::int64_t row, std::int64_t start, std::int64_t keys, std::int64_t i) const {
    Integers y[ROWS][VECTORS];
    for (int r = 0; r < ROWS; ++r) {
      for (int v = 0; v < VECTORS; ++v) y[r][v] = Integers{};
    }
    const std::int8_t* values = values_ + start * row_ + i;
    // Whole rows ahead, so that a tile of some of a row's elements prefetches the same elements.
    const std::int64_t soon = std::max(few_keys().soon_bytes / row_, std::int64_t{1}) * row_;
    // The keys of the next chunk, in the order they lie in memory: each tile prefetches a part of
    // them.
    const std::int8_t* next = keys_ + std::min(start + keys, sweep_.keys - keys) * row_ + i * keys;
    const std::int16_t* factors = factors_ + row * kFewKeysMost;
    for (std::int64_t j = 0; j < keys; j += 2) {
      const std::int8_t* value = values + j * row_;
      const std::int8_t* other = j + 1 < keys ? value + row_ : value;
      for (int line = 0; line < VECTORS * kLanes; line += kCacheLine) {
        next = prefetch(prefetch(next));
        __builtin_prefetch(value + soon + line);
        __builtin_prefetch(other + soon + line);
      }
      Int16Vector f[ROWS];
      for (int r = 0; r < ROWS; ++r) f[r] = broadcast_pair(factors + r * kFewKeysMost + j);
      for (int v = 0; v < VECTORS; v += 2) {
        const TwoWords pairs = pairs_of(value + v * kLanes, other + v * kLanes);
        for (int r = 0; r < ROWS; ++r) {
          y[r][v] = add_products(y[r][v], f[r], pairs.first);
          y[r][v + 1] = add_products(y[r][v + 1], f[r], pairs.second);
        }
      }
    }
    for (int r = 0; r < ROWS; ++r) {
      for (int v = 0; v < VECTORS; ++v) {
        float* numerator = sweep_.numerator[row + r] + i + v * kLanes;
        store(numerator, __builtin_convertvector(y[r][v], Vector) * factor_scales_[row + r] +
                             corrections_[row + r] * load(numerator));
      }
    }
  }

  // Adds values from element `i` on, in tiles of VECTORS vectors while they fit the head, then of
  // half as many, down to two; returns where they end.
  template <int ROWS, int VECTORS>
  std::int64_t value_tiles(std::int64_t row, std::int64_t start, std::int64_t keys,
                           std::int64_t i) const {
    for (; i + VECTORS * kLanes <= head_size_; i += VECTORS * kLanes)
      value_tile<ROWS, VECTORS>(row, start, keys, i);
    if constexpr (VECTORS > 2) return value_tiles<ROWS, VECTORS / 2>(row, start, keys, i);
    return i;
  }

  template <int ROWS>
  void value_rows(std::int64_t row, std::int64_t start, std::int64_t keys) const {
    std::int64_t i = value_tiles<ROWS, kTileVectors / ROWS>(row, start, keys, 0);
    for (; i < head_size_; ++i) {
      for (int r = 0; r < ROWS; ++r) {
        std::int32_t y = 0;
        for (std::int64_t j = 0; j < keys; ++j)
          y += factors_[(row + r) * kFewKeysMost + j] * values_[(start + j) * row_ + i];
        float& numerator = sweep_.numerator[row + r][i];
        numerator =
            static_cast<float>(y) * factor_scales_[row + r] + corrections_[row + r] * numerator;
      }
    }
  }

  void put_in_order(float* numerator) const {
    for (std::int64_t i = 0; i < whole_; i += kInt16Lanes) {
      const TwoVectors v = in_order({load(numerator + i), load(numerator + i + kLanes)});
      store(numerator + i, v.first);
      store(numerator + i + kLanes, v.second);
    }
  }

  const std::int8_t* keys_;
  const std::int8_t* values_;
  // Bytes from a key to the next.
  const std::int64_t row_;
  // Elements of a head that fill whole vectors of int16.
  const std::int64_t whole_;
  alignas(64) std::int16_t query_[kFewRows * kMaxHeadSize];
  alignas(64) std::int16_t factors_[kFewRows * kFewKeysMost];
  alignas(64) float scales_[kFewKeysMost];
  float query_scales_[kFewRows];
  float factor_scales_[kFewRows];
};

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
