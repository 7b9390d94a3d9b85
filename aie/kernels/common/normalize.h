// SPDX-License-Identifier: Apache-2.0
// Functions of all kernels of norms: RMS normalisation of one row in registers, and a residual
// connection.
#pragma once

#include "aie/kernels/common/float_math.h"

namespace flownpu {

// sum = x + residual, rounded to bf16.
inline void add(const bfloat16* x, const bfloat16* residual, bfloat16* sum, unsigned n) {
  AIE_PREPARE_FOR_PIPELINING
  for (unsigned i = 0; i < n; i += kLanes) {
    const Accumulator<kLanes> left(aie::load_v<kLanes>(x + i));
    const auto total = aie::add(left, aie::load_v<kLanes>(residual + i));
    aie::store_v(sum + i, total.to_vector<bfloat16>());
  }
}

// sums + x^2, lane by lane.
inline Accumulator<kLanes> add_squares(Accumulator<kLanes> squares, const bfloat16* x, unsigned n) {
  AIE_PREPARE_FOR_PIPELINING
  for (unsigned i = 0; i < n; i += kLanes) {
    const Bf16<kLanes> values = aie::load_v<kLanes>(x + i);
    squares = aie::mac(squares, values, values);
  }
  return squares;
}

// 1 / sqrt(mean(x^2) + epsilon), in all lanes, of n numbers whose squares have these sums.
inline Parts<kLanes> inverse_of_sum(const Float<kLanes>& sums, unsigned n, float epsilon) {
  const float sum = aie::reduce_add(sums);
  return broadcast_parts<kLanes>(aie::invsqrt(sum * aie::inv(static_cast<float>(n)) + epsilon));
}

inline Parts<kLanes> inverse_rms(const bfloat16* x, unsigned n, float epsilon) {
  const auto squares = add_squares(aie::zeros<accfloat, kLanes>(), x, n);
  return inverse_of_sum(squares.to_vector<float>(), n, epsilon);
}

// x inverse weight, for 16 elements.
inline Accumulator<kLanes> normalize(const bfloat16* x, const Parts<kLanes>& inverse,
                                     const bfloat16* weight) {
  const Accumulator<kLanes> normal = multiply(inverse, Bf16<kLanes>(aie::load_v<kLanes>(x)));
  return multiply(split(normal), Bf16<kLanes>(aie::load_v<kLanes>(weight)));
}

}  // namespace flownpu
