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

// 1 / sqrt(mean(x^2) + epsilon), in all lanes.
inline Parts<kLanes> inverse_rms(const bfloat16* x, unsigned n, float epsilon) {
  Accumulator<kLanes> squares = aie::zeros<accfloat, kLanes>();
  AIE_PREPARE_FOR_PIPELINING
  for (unsigned i = 0; i < n; i += kLanes) {
    const Bf16<kLanes> values = aie::load_v<kLanes>(x + i);
    squares = aie::mac(squares, values, values);
  }
  const float sum = aie::reduce_add(squares.to_vector<float>());
  return broadcast_parts<kLanes>(aie::invsqrt(sum * aie::inv(static_cast<float>(n)) + epsilon));
}

// x inverse weight, for 16 elements.
inline Accumulator<kLanes> normalize(const bfloat16* x, const Parts<kLanes>& inverse,
                                     const bfloat16* weight) {
  const Accumulator<kLanes> normal = multiply(inverse, Bf16<kLanes>(aie::load_v<kLanes>(x)));
  return multiply(split(normal), Bf16<kLanes>(aie::load_v<kLanes>(weight)));
}

}  // namespace flownpu
