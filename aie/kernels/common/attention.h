// SPDX-License-Identifier: Apache-2.0
// The steps of chunked attention in FlowQKV and FlowKV (Gemma3 on NPU, section 3.1.3, eq. 6-12) for
// a block of R rows, 8 (queries) or 4 (heads of one query), against one chunk of keys or values.
//
// Everything is in powers of 2: softmax(s) = 2^(t - max t) / sum, t = s scale log2(e), |t| < 10^6.
// A chunk of keys raises the running maximum from m_left to m; F = 2^(t - m), the correction C =
// 2^(m_left - m), the denominator l = C l + the sum of F, and Y = C Y + F V. m is rounded up to an
// integer, so C is a power of 2: exact in bf16, and multiplying the sums by it is exact, however
// many chunks there are. F lies in [1/2, 1] at a row's maximum.
//
// P rows of sub-tiles are taken side by side (2, where there are as many): a product's operand is
// loaded and converted once for both, sums of 2 x 2 sub-tiles stay in 4 of the 5 accumulators, and
// the softmax of one sub-tile hides the latency of the other's. Counted for 64 scores without
// masks, on XDNA2: 48 instructions of the vector unit (13 before the maximum, 35 after it, of which
// exp2 31), in a chain of about 106 cycles that two sub-tiles share. Masks take another 144 scalar
// instructions; where all rows see all keys of a chunk there are none.
#pragma once

#include <aie_api/aie.hpp>
#include <cstdint>

#include "aie/kernels/common/float_math.h"

namespace flownpu::attention {

inline constexpr unsigned kSide = 8;
// Below every score; finite, so that differences are finite, too.
inline constexpr float kLowest = -1e30F;
// t + 1/2 of a key that a row does not see. It is below every |t| < 10^6, and still positive when
// kRounder is added, so that sums with it compare as integers.
inline constexpr float kHidden = -2e6F;
inline constexpr unsigned kParameters = 16;

// A soft cap c of the scores, where there is one: t = c log2(e) tanh(score / c). `inside` is the
// factor of a product Q K^T that gives the power of tanh_of_power, `outside` that of the tanh.
struct SoftCap {
  bool given;
  float inside = 0, outside = 0;

  // cap: bits of c; 0: there is none. scale: that of the run-time parameters, with log2(e).
  SoftCap(std::int32_t cap, float scale) : given(cap != 0) {
    if (!given) return;
    inside = -2.0F * scale * aie::inv(float_of(cap));
    outside = 1.44269504F * float_of(cap);
  }

  // Replaces products by tanh(score / c).
  template <unsigned N>
  Float<N> of_products(const Float<N>& products) const {
    return tanh_of_power(multiply(split(products), broadcast_parts<N>(inside)))
        .template to_vector<float>();
  }
};

// The run-time parameters' words (README.md), and the soft cap.
struct Parameters {
  std::int32_t first_query, first_key, key_end, window, causal;
  float scale;
  std::int32_t queries;
  SoftCap cap;

  explicit Parameters(const std::int32_t* rtp, std::int32_t cap_bits = 0)
      : scale(float_of(aie::load_v<kParameters>(rtp).get(6))), cap(cap_bits, scale) {
    const auto words = aie::load_v<kParameters>(rtp);
    first_query = words.get(1);
    first_key = words.get(2);
    key_end = words.get(3);
    window = words.get(4);
    causal = words.get(5);
    if (cap.given) scale = cap.outside;
    // Less than one, as in an unwritten word, would make `positions` search without end.
    queries = words.get(7) < 1 ? 1 : words.get(7);
  }
};

// state: a vector of 16 words with the position of the next key, then m f32[rows], l f32[rows].
inline constexpr unsigned kPositionWords = 16;
inline float* maxima(float* state) { return state + kPositionWords; }
inline float* denominators(float* state, unsigned rows) { return maxima(state) + rows; }
inline const float* denominators(const float* state, unsigned rows) {
  return state + kPositionWords + rows;
}
inline std::int32_t load_position(const float* state) {
  return aie::load_v<kPositionWords>(reinterpret_cast<const std::int32_t*>(state)).get(0);
}
inline void store_position(float* state, std::int32_t position) {
  aie::store_v(reinterpret_cast<std::int32_t*>(state),
               aie::broadcast<std::int32_t, kPositionWords>(position));
}

template <unsigned R>
void start_rows(float* state, unsigned rows, const Parameters& parameters) {
  for (unsigned row = 0; row < rows; row += R) {
    aie::store_v(maxima(state) + row, aie::broadcast<float, R>(kLowest));
    aie::store_v(denominators(state, rows) + row, aie::zeros<float, R>());
  }
  store_position(state, parameters.first_key);
}

// A sub-tile [R][8] that has lane r of v in all 8 lanes of row r.
template <unsigned R>
Float<R * kSide> by_row(const Float<R>& v) {
  Float<R * kSide> rows;
  AIE_LOOP_UNROLL_FULL
  for (unsigned r = 0; r < R; ++r) rows.insert(r, aie::broadcast<float, kSide>(v.get(r)));
  return rows;
}
// v x power of each row; `power` holds powers of 2. Registers of bf16 have at least 8 lanes, so 4
// rows are doubled to 8.
template <unsigned R>
Float<R> multiply_rows_by_power(const Float<R>& v, const Float<R>& power) {
  if constexpr (R == 4) {
    return multiply_rows_by_power<8>(aie::concat(v, v), aie::concat(power, power))
        .template extract<4>(0);
  } else {
    const Bf16<R> exact = Accumulator<R>(power).template to_vector<bfloat16>();
    return multiply_by_power(Accumulator<R>(v), exact).template to_vector<float>();
  }
}

// Combines the 8 numbers of each row of a sub-tile, by combining even with odd lanes three times.
// All rows are reduced at once, in 12 instructions: as many as the reduction of one row takes.
template <typename T, unsigned N, typename Combine>
auto combine_rows(const aie::vector<T, N>& tile, Combine combine) {
  const auto fours = combine(aie::filter_even(tile), aie::filter_odd(tile));
  const auto twos = combine(aie::filter_even(fours), aie::filter_odd(fours));
  return combine(aie::filter_even(twos), aie::filter_odd(twos));
}

inline std::int32_t limit_to_lanes(std::int32_t lane) { return lane < 0 ? 0 : lane > 8 ? 8 : lane; }

// The mask of a sub-tile: whether a row sees a key of the 8 at `key`. `query` holds the rows'
// positions.
template <unsigned R>
aie::mask<R * kSide> visible(const aie::vector<std::int32_t, R>& query, std::int32_t key,
                             const Parameters& parameters) {
  unsigned words[2] = {0, 0};
  AIE_LOOP_UNROLL_FULL
  for (unsigned r = 0; r < R; ++r) {
    const std::int32_t position = query.get(r);
    const std::int32_t last = parameters.causal != 0 && position + 1 < parameters.key_end
                                  ? position + 1
                                  : parameters.key_end;
    const std::int32_t first = position < parameters.window ? 0 : position - parameters.window + 1;
    const unsigned below_end = (1U << limit_to_lanes(last - key)) - 1;
    const unsigned below_first = (1U << limit_to_lanes(first - key)) - 1;
    words[r / 4] |= (below_end & ~below_first) << (r % 4 * kSide);
  }
  if constexpr (R == 4) return aie::mask<32>::from_uint32(words[0]);
  if constexpr (R == 8) return aie::mask<64>::from_uint32(words[0], words[1]);
}

// Positions of the rows `row` .. `row` + R - 1: heads follow one another, `queries` rows each.
template <unsigned R>
aie::vector<std::int32_t, R> positions(unsigned row, const Parameters& parameters) {
  auto query = static_cast<std::int32_t>(row);
  while (query >= parameters.queries) query -= parameters.queries;
  aie::vector<std::int32_t, R> v;
  for (unsigned r = 0; r < R; ++r) {
    v.set(parameters.first_query + query, r);
    query = query + 1 == parameters.queries ? 0 : query + 1;
  }
  return v;
}

// Whether all rows see all keys of a chunk: it ends within the keys and, if causal, at or before
// the first query, and begins in the last query's window.
inline bool sees_all(std::int32_t key, std::int32_t keys, const Parameters& parameters) {
  const std::int32_t last_query = parameters.first_query + parameters.queries - 1;
  return key + keys <= parameters.key_end &&
         (parameters.causal == 0 || key + keys - 1 <= parameters.first_query) &&
         key > last_query - parameters.window;
}

// Q K^T of P rows of sub-tiles and C columns of them. `Operands` loads a sub-tile of either side,
// and hands one of the right side to its Mmul. q [P][d/8][R][8], k [C][d/8][8][8], scores
// [P][key_tiles][R][8].
template <unsigned P, unsigned C, typename Operands>
void multiply_keys(const bfloat16* q, const bfloat16* k, float* scores, unsigned key_tiles,
                   unsigned d_tiles) {
  using Mmul = typename Operands::Mmul;
  Mmul sums[P][C];
  AIE_PREPARE_FOR_PIPELINING
  AIE_LOOP_MIN_ITERATION_COUNT(1)
  for (unsigned i = 0; i < d_tiles; ++i) {
    typename Mmul::vector_A_type left[P];
    AIE_LOOP_UNROLL_FULL
    for (unsigned p = 0; p < P; ++p) left[p] = Operands::left(q + (p * d_tiles + i) * Mmul::size_A);
    AIE_LOOP_UNROLL_FULL
    for (unsigned c = 0; c < C; ++c) {
      const auto right = Operands::keys(k + (c * d_tiles + i) * Mmul::size_B);
      AIE_LOOP_UNROLL_FULL
      for (unsigned p = 0; p < P; ++p) sums[p][c].mac(left[p], Operands::right(right));
    }
  }
  AIE_LOOP_UNROLL_FULL
  for (unsigned p = 0; p < P; ++p) {
    AIE_LOOP_UNROLL_FULL
    for (unsigned c = 0; c < C; ++c) {
      aie::store_v(scores + (p * key_tiles + c) * Mmul::size_C,
                   sums[p][c].template to_vector<float>());
    }
  }
}

// A chunk of keys as P rows of sub-tiles meet it: where its keys begin, how many sub-tiles they
// are, and, for masks, the positions of the rows.
template <unsigned R, unsigned P>
struct Block {
  std::int32_t key;
  unsigned key_tiles;
  aie::vector<std::int32_t, R> queries[P];

  aie::mask<R * kSide> seen(unsigned p, unsigned j, const Parameters& parameters) const {
    return visible<R>(queries[p], key + static_cast<std::int32_t>(j * kSide), parameters);
  }
};

// Replaces the products of P rows of sub-tiles by t + 1/2, and raises `largest` to the bits of the
// largest t + 1/2 + kRounder, lane by lane.
template <unsigned R, unsigned P, bool kMasked>
void scale_scores(const Parameters& parameters, const Block<R, P>& block,
                  aie::vector<std::int32_t, R * kSide>* largest, float* scores) {
  constexpr unsigned kSize = R * kSide;
  const Parts<kSize> scale = broadcast_parts<kSize>(parameters.scale);
  const auto rounder = aie::broadcast<float, kSize>(kRounder);
  for (unsigned j = 0; j < block.key_tiles; ++j) {
    AIE_LOOP_UNROLL_FULL
    for (unsigned p = 0; p < P; ++p) {
      float* at = scores + (p * block.key_tiles + j) * kSize;
      const Float<kSize> product = aie::load_v<kSize>(at);
      Accumulator<kSize> t = multiply_add(constant<kSize>(0.5F), split(product), scale);
      if constexpr (kMasked) {
        const auto seen = block.seen(p, j, parameters);
        t = Accumulator<kSize>(aie::select(aie::broadcast<float, kSize>(kHidden),
                                           t.template to_vector<float>(), seen));
      }
      aie::store_v(at, t.template to_vector<float>());
      const Float<kSize> rounded = aie::add(t, rounder).template to_vector<float>();
      largest[p] = aie::max(largest[p], rounded.template cast_to<std::int32_t>());
    }
  }
}

// F of P rows of sub-tiles, and its sums over the sub-tiles. `m`: m + 1/2 of each row, in all lanes
// of the row.
template <unsigned R, unsigned P, bool kMasked>
void raise_scores(const Parameters& parameters, const Block<R, P>& block, const Float<R * kSide>* m,
                  Accumulator<R * kSide>* sums, const float* scores, bfloat16* f) {
  constexpr unsigned kSize = R * kSide;
  const auto ones = aie::broadcast<bfloat16, kSize>(bfloat16(1.0F));
  for (unsigned j = 0; j < block.key_tiles; ++j) {
    AIE_LOOP_UNROLL_FULL
    for (unsigned p = 0; p < P; ++p) {
      const unsigned tile = (p * block.key_tiles + j) * kSize;
      const Accumulator<kSize> t(aie::load_v<kSize>(scores + tile));
      const Float<kSize> power = rough_power_of_two(aie::sub(t, m[p]));
      Bf16<kSize> seen = Accumulator<kSize>(power).template to_vector<bfloat16>();
      if constexpr (kMasked) {
        const auto mask = block.seen(p, j, parameters);
        seen = aie::select(aie::zeros<bfloat16, kSize>(), seen, mask);
      }
      aie::store_v(f + tile, seen);
      // The sum of the factors that PV multiplies, so that rounding F cancels in O = Y / l.
      sums[p] = aie::mac(sums[p], seen, ones);
    }
  }
}

// For P R rows whose products Q K^T are in `scores`: t, masked; m; C; F; l. f [P][keys/8][R][8],
// like the scores.
template <unsigned R, unsigned P, bool kMasked>
void soften_rows(const Parameters& parameters, const Block<R, P>& block, float* m_of_rows,
                 float* l_of_rows, float* correction_of_rows, bfloat16* f, float* scores) {
  constexpr unsigned kSize = R * kSide;
  using Bits = aie::vector<std::int32_t, R>;
  aie::vector<std::int32_t, kSize> largest[P];
  Accumulator<kSize> sums[P];
  Float<kSize> m_by_row[P];
  Float<R> corrections[P];
  // No row's maximum is below -10^6, also if it sees no key.
  constexpr auto kLeast = __builtin_bit_cast(std::int32_t, kRounder - 1e6F);
  AIE_LOOP_UNROLL_FULL
  for (unsigned p = 0; p < P; ++p) {
    largest[p] = aie::broadcast<std::int32_t, kSize>(kLeast);
    sums[p] = aie::zeros<accfloat, kSize>();
  }
  scale_scores<R, P, kMasked>(parameters, block, largest, scores);

  // m: the maximum rounded up. Adding 1/2 before rounding to the nearest may give one more:
  // harmless.
  const Float<R> rounder = aie::broadcast<float, R>(kRounder);
  const auto larger = [](const auto& a, const auto& b) { return aie::max(a, b); };
  AIE_LOOP_UNROLL_FULL
  for (unsigned p = 0; p < P; ++p) {
    const Bits up = combine_rows(largest[p], larger);
    const Float<R> m_left = aie::load_v<R>(m_of_rows + p * R);
    const Float<R> m = aie::max(m_left, aie::sub(up.template cast_to<float>(), rounder));
    aie::store_v(m_of_rows + p * R, m);
    const Float<R> change =
        aie::max(aie::sub(m_left, m), aie::broadcast<float, R>(kLowestExponent));
    corrections[p] = power_of_integer(aie::add(change, rounder));
    aie::store_v(correction_of_rows + p * R, corrections[p]);
    m_by_row[p] = by_row<R>(aie::add(m, aie::broadcast<float, R>(0.5F)));
  }
  raise_scores<R, P, kMasked>(parameters, block, m_by_row, sums, scores, f);

  AIE_LOOP_UNROLL_FULL
  for (unsigned p = 0; p < P; ++p) {
    const auto together = [](const auto& a, const auto& b) { return aie::add(a, b); };
    const Float<R> added = combine_rows(sums[p].template to_vector<float>(), together);
    const Float<R> l = multiply_rows_by_power<R>(aie::load_v<R>(l_of_rows + p * R), corrections[p]);
    aie::store_v(l_of_rows + p * R, aie::add(l, added));
  }
}

// Replaces `count` products by tanh(score / c). A pass of its own keeps the loops of models without
// a soft cap, and their registers, as they are, and is once in program memory.
template <unsigned N>
[[gnu::noinline]] void cap_scores(const SoftCap& cap, float* scores, unsigned count) {
  AIE_PREPARE_FOR_PIPELINING
  for (unsigned i = 0; i < count; i += N)
    aie::store_v(scores + i, cap.of_products<N>(aie::load_v<N>(scores + i)));
}

// Q K^T, m, C, F and l for P R rows of a tile, of which `row` is the first; all pointers but k and
// scores are to that row's.
template <unsigned R, unsigned P, typename Operands>
void score_rows(const bfloat16* q, const bfloat16* k, const Parameters& parameters,
                std::int32_t key, bool masked, unsigned row, float* m_of_rows, float* l_of_rows,
                float* correction_of_rows, bfloat16* f, float* scores, unsigned key_tiles,
                unsigned d_tiles) {
  constexpr unsigned kKeyTile = kSide * kSide;
  unsigned j = 0;
  for (; j + 2 <= key_tiles; j += 2) {
    multiply_keys<P, 2, Operands>(q, k + j * d_tiles * kKeyTile, scores + j * R * kSide, key_tiles,
                                  d_tiles);
  }
  if (j < key_tiles) {
    multiply_keys<P, 1, Operands>(q, k + j * d_tiles * kKeyTile, scores + j * R * kSide, key_tiles,
                                  d_tiles);
  }
  if (parameters.cap.given)
    cap_scores<R * kSide>(parameters.cap, scores, P * key_tiles * R * kSide);
  if (!masked) {
    soften_rows<R, P, false>(parameters, Block<R, P>{key, key_tiles, {}}, m_of_rows, l_of_rows,
                             correction_of_rows, f, scores);
    return;
  }
  // Few chunks have an edge, and masks of neighbouring sub-tiles would take another third of the
  // program memory's 16 KB.
  for (unsigned p = 0; p < P; ++p) {
    const Block<R, 1> block{key, key_tiles, {positions<R>(row + p * R, parameters)}};
    const unsigned first = p * key_tiles * R * kSide;
    soften_rows<R, 1, true>(parameters, block, m_of_rows + p * R, l_of_rows + p * R,
                            correction_of_rows + p * R, f + first, scores + first);
  }
}

// Y += F V for P rows of sub-tiles and C sub-tiles of keys, whose F stays in registers during the
// loop over V's columns. f [P][key_tiles][R][8] from the first of these keys on, v [C][d/8][8][8],
// y [P][d/8][R][8].
template <unsigned P, unsigned C, typename Operands>
void multiply_values(const bfloat16* f, const bfloat16* v, float* y, unsigned key_tiles,
                     unsigned d_tiles) {
  using Mmul = typename Operands::Mmul;
  typename Mmul::vector_A_type left[P][C];
  AIE_LOOP_UNROLL_FULL
  for (unsigned p = 0; p < P; ++p) {
    AIE_LOOP_UNROLL_FULL
    for (unsigned c = 0; c < C; ++c)
      left[p][c] = Operands::left(f + (p * key_tiles + c) * Mmul::size_A);
  }
  AIE_PREPARE_FOR_PIPELINING
  AIE_LOOP_MIN_ITERATION_COUNT(1)
  for (unsigned i = 0; i < d_tiles; ++i) {
    typename Mmul::vector_B_type right[C];
    AIE_LOOP_UNROLL_FULL
    for (unsigned c = 0; c < C; ++c)
      right[c] = Operands::values(v + (c * d_tiles + i) * Mmul::size_B);
    AIE_LOOP_UNROLL_FULL
    for (unsigned p = 0; p < P; ++p) {
      float* at = y + (p * d_tiles + i) * Mmul::size_C;
      Mmul sum(aie::load_v<Mmul::size_C>(at));
      AIE_LOOP_UNROLL_FULL
      for (unsigned c = 0; c < C; ++c) sum.mac(left[p][c], Operands::right(right[c]));
      aie::store_v(at, sum.template to_vector<float>());
    }
  }
}

// Y = C Y for R rows. Usually no row has a new maximum, C is 1, and nothing is done.
template <unsigned R>
void rescale_rows(const Float<R>& correction, float* y, unsigned d_tiles) {
  constexpr unsigned kSize = R * kSide;
  const bool rescale = __builtin_bit_cast(std::int32_t, aie::reduce_min(correction)) !=
                       __builtin_bit_cast(std::int32_t, 1.0F);
  if (!rescale) return;
  const Bf16<kSize> power =
      Accumulator<kSize>(by_row<R>(correction)).template to_vector<bfloat16>();
  for (unsigned i = 0; i < d_tiles; ++i) {
    const Accumulator<kSize> left(aie::load_v<kSize>(y + i * kSize));
    aie::store_v(y + i * kSize, multiply_by_power(left, power).template to_vector<float>());
  }
}

// Y = C Y + F V for P R rows. f [P][keys/8][R][8], v tiled(keys, d), y [P][d/8][R][8].
template <unsigned R, unsigned P, typename Operands>
void add_values(const bfloat16* f, const bfloat16* v, const float* correction_of_rows, float* y,
                unsigned key_tiles, unsigned d_tiles) {
  constexpr unsigned kSize = R * kSide;
  constexpr unsigned kKeyTile = kSide * kSide;
  for (unsigned p = 0; p < P; ++p)
    rescale_rows<R>(aie::load_v<R>(correction_of_rows + p * R), y + p * d_tiles * kSize, d_tiles);
  unsigned j = 0;
  for (; j + 2 <= key_tiles; j += 2)
    multiply_values<P, 2, Operands>(f + j * kSize, v + j * d_tiles * kKeyTile, y, key_tiles,
                                    d_tiles);
  if (j < key_tiles)
    multiply_values<P, 1, Operands>(f + j * kSize, v + j * d_tiles * kKeyTile, y, key_tiles,
                                    d_tiles);
}

// 1 / l of R rows, in all lanes of each row. l is at least 1/2 once a row has seen a key; a row
// that saw none has Y = 0.
template <unsigned R>
Parts<R * kSide> inverse_by_row(const Float<R>& l) {
  const Float<R> limited = aie::max(l, aie::broadcast<float, R>(0.25F));
  return split(reciprocal(Accumulator<R * kSide>(by_row<R>(limited))));
}

}  // namespace flownpu::attention
