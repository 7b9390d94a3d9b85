// SPDX-License-Identifier: Apache-2.0
// What FlowQKV and FlowKV share: the steps of chunked attention (Gemma3 on NPU, section 3.1.3, eq.
// 6-12) for a block of R rows, 8 (queries) or 4 (heads of one query), against one chunk of keys or
// values.
//
// Everything is in powers of 2: softmax(s) = 2^(t - max t) / sum, t = s scale log2(e). The running
// maximum m is rounded up to an integer, so the correction 2^(m_left - m) is a power of 2: exact in
// bf16, and multiplying the sums by it is exact, however many chunks there are. F lies in [1/2, 1]
// at a row's maximum. |t| < 10^6.
#pragma once

#include <aie_api/aie.hpp>
#include <cstdint>

#include "aie/kernels/float_math.h"

namespace flownpu::attention {

inline constexpr unsigned kSide = 8;
// Below every score; finite, so that differences are.
inline constexpr float kLowest = -1e30F;
inline constexpr unsigned kParameters = 16;

// The run-time parameters' words (README.md).
struct Parameters {
  std::int32_t first_query, first_key, key_end, window, causal;
  float scale;
  std::int32_t queries;

  explicit Parameters(const std::int32_t* rtp) {
    const auto words = aie::load_v<kParameters>(rtp);
    first_query = words.get(1);
    first_key = words.get(2);
    key_end = words.get(3);
    window = words.get(4);
    causal = words.get(5);
    scale = float_of(words.get(6));
    // Fewer than one, as where the word was never written, would make `positions` a search without
    // end.
    queries = words.get(7) < 1 ? 1 : words.get(7);
  }
};

// state: in a vector of its own the position of the next key, then m f32[rows], l f32[rows].
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

// Lane r of v, for all 8 lanes of row r of a sub-tile [R][8].
template <unsigned R>
Float<R * kSide> by_row(const Float<R>& v) {
  Float<R * kSide> rows;
  AIE_LOOP_UNROLL_FULL
  for (unsigned r = 0; r < R; ++r) rows.insert(r, aie::broadcast<float, kSide>(v.get(r)));
  return rows;
}
// v 2^k of each row. Registers of bf16 have at least 8 lanes, so 4 rows go twice.
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

// The largest, or the sum, of each row of a sub-tile.
template <unsigned R>
Float<R> largest_of_rows(const Float<R * kSide>& tile) {
  Float<R> largest;
  AIE_LOOP_UNROLL_FULL
  for (unsigned r = 0; r < R; ++r) largest.set(aie::reduce_max(tile.template extract<kSide>(r)), r);
  return largest;
}
template <unsigned R>
Float<R> sums_of_rows(const Float<R * kSide>& tile) {
  Float<R> sums;
  AIE_LOOP_UNROLL_FULL
  for (unsigned r = 0; r < R; ++r) sums.set(aie::reduce_add(tile.template extract<kSide>(r)), r);
  return sums;
}

inline std::int32_t limit_to_lanes(std::int32_t lane) { return lane < 0 ? 0 : lane > 8 ? 8 : lane; }

// Which keys of the 8 at `key` the rows may see, as a mask of a sub-tile. `query` holds their
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

// Steps (1) to (5) for R rows, of which the first is `row`: scores t, masked; m; F; C; l.
// `multiply_keys(j, i)` sums Q K^T over d for key sub-tile j. f [keys/8][R][8].
template <unsigned R, typename MultiplyKeys>
void soften_rows(MultiplyKeys multiply_keys, const Parameters& parameters, std::int32_t key,
                 unsigned row, unsigned key_tiles, float* m_of_rows, float* l_of_rows,
                 float* correction_of_rows, bfloat16* f, float* scores) {
  constexpr unsigned kSize = R * kSide;
  const auto query = positions<R>(row, parameters);
  const Parts<kSize> scale = broadcast_parts<kSize>(parameters.scale);
  const auto lowest = aie::broadcast<float, kSize>(kLowest);

  Float<kSize> largest = lowest;
  for (unsigned j = 0; j < key_tiles; ++j) {
    const auto mask = visible<R>(query, key + static_cast<std::int32_t>(j * kSide), parameters);
    const Float<kSize> scaled =
        multiply(split(multiply_keys(j)), scale).template to_vector<float>();
    const Float<kSize> t = aie::select(lowest, scaled, mask);
    largest = aie::max(largest, t);
    aie::store_v(scores + j * kSize, t);
  }

  // m: the maximum rounded up. Adding 1/2 before rounding to the nearest may give one more:
  // harmless.
  const Float<R> rounder = aie::broadcast<float, R>(kRounder);
  const Float<R> m_left = aie::load_v<R>(m_of_rows);
  const Float<R> limited = aie::max(largest_of_rows<R>(largest), aie::broadcast<float, R>(-1e6F));
  const Float<R> up = aie::add(aie::add(limited, aie::broadcast<float, R>(0.5F)), rounder);
  const Float<R> m = aie::max(m_left, aie::sub(up, rounder));
  aie::store_v(m_of_rows, m);
  const Float<R> change = aie::max(aie::sub(m_left, m), aie::broadcast<float, R>(kLowestExponent));
  const Float<R> correction = power_of_integer(aie::add(change, rounder));
  aie::store_v(correction_of_rows, correction);

  const Float<kSize> m_by_row = by_row<R>(m);
  Accumulator<kSize> sums = aie::zeros<accfloat, kSize>();
  for (unsigned j = 0; j < key_tiles; ++j) {
    const auto mask = visible<R>(query, key + static_cast<std::int32_t>(j * kSide), parameters);
    const Float<kSize> power =
        power_of_two(aie::sub(aie::load_v<kSize>(scores + j * kSize), m_by_row));
    const Bf16<kSize> rounded = Accumulator<kSize>(power).template to_vector<bfloat16>();
    const Bf16<kSize> seen = aie::select(aie::zeros<bfloat16, kSize>(), rounded, mask);
    aie::store_v(f + j * kSize, seen);
    // The sum of what PV multiplies by, so that rounding F cancels in O = Y / l.
    sums = aie::add(sums, seen);
  }

  const Float<R> added = sums_of_rows<R>(sums.template to_vector<float>());
  const Float<R> l = multiply_rows_by_power<R>(aie::load_v<R>(l_of_rows), correction);
  aie::store_v(l_of_rows, aie::add(l, added));
}

// Step (6) for R rows: Y = C Y + F V. f [keys/8][R][8], v tiled(keys, d), y [d/8][R][8].
template <unsigned R, typename Mmul>
void add_values(const bfloat16* f, const bfloat16* v, const Float<R>& correction, float* y,
                unsigned key_tiles, unsigned d_tiles) {
  constexpr unsigned kSize = R * kSide;
  // Mostly no row has a new maximum, and C is 1.
  const bool rescale = __builtin_bit_cast(std::int32_t, aie::reduce_min(correction)) !=
                       __builtin_bit_cast(std::int32_t, 1.0F);
  const Bf16<kSize> power =
      Accumulator<kSize>(by_row<R>(correction)).template to_vector<bfloat16>();
  for (unsigned c = 0; c < d_tiles; ++c) {
    Accumulator<kSize> left(aie::load_v<kSize>(y + c * kSize));
    if (rescale) left = multiply_by_power(left, power);
    Mmul sum(left);
    AIE_PREPARE_FOR_PIPELINING
    AIE_LOOP_MIN_ITERATION_COUNT(1)
    for (unsigned j = 0; j < key_tiles; ++j) {
      sum.mac(aie::load_v<kSize>(f + j * kSize), aie::load_v<64>(v + (j * d_tiles + c) * 64));
    }
    aie::store_v(y + c * kSize, sum.template to_vector<float>());
  }
}

// 1 / l of R rows, by row. l is at least 1/2 once a row has seen a key; a row that saw none has Y =
// 0.
template <unsigned R>
Parts<R * kSide> inverse_by_row(const Float<R>& l) {
  const Float<R> limited = aie::max(l, aie::broadcast<float, R>(0.25F));
  return split(reciprocal(Accumulator<R * kSide>(by_row<R>(limited))));
}

}  // namespace flownpu::attention
