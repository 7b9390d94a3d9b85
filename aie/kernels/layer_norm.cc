// SPDX-License-Identifier: Apache-2.0
// The residual connection and the layer normalisation after it, s = x + residual:
//     y = (s - mean) / sqrt(variance + epsilon) weight + bias
//
// Dataflow: three passes over a row in L1; the variance is the mean of (s - mean)^2, never a
// difference of large sums. Layout: lines(rows, n). Caller: aie/designs/vector_operators.py.
#include "aie/kernels/common/normalize.h"
#include "aie/kernels/kernels.h"

namespace flownpu {
namespace {

Accumulator<kLanes> centred(const bfloat16* x, const Float<kLanes>& mean) {
  return aie::sub(Accumulator<kLanes>(aie::load_v<kLanes>(x)), mean);
}

void normalize_row(const bfloat16* x, const bfloat16* weight, const bfloat16* bias, bfloat16* y,
                   unsigned n, float epsilon) {
  const float per_element = aie::inv(static_cast<float>(n));
  Accumulator<kLanes> sums = aie::zeros<accfloat, kLanes>();
  AIE_PREPARE_FOR_PIPELINING
  for (unsigned i = 0; i < n; i += kLanes) sums = aie::add(sums, aie::load_v<kLanes>(x + i));
  const auto mean =
      aie::broadcast<float, kLanes>(aie::reduce_add(sums.to_vector<float>()) * per_element);

  Accumulator<kLanes> squares = aie::zeros<accfloat, kLanes>();
  AIE_PREPARE_FOR_PIPELINING
  for (unsigned i = 0; i < n; i += kLanes) {
    const auto parts = split(centred(x + i, mean));
    squares = multiply_add(squares, parts, parts);
  }
  const float variance = aie::reduce_add(squares.to_vector<float>()) * per_element;
  const auto inverse = broadcast_parts<kLanes>(aie::invsqrt(variance + epsilon));

  AIE_PREPARE_FOR_PIPELINING
  for (unsigned i = 0; i < n; i += kLanes) {
    const auto normal = split(multiply(split(centred(x + i, mean)), inverse));
    const Bf16<kLanes> scale = aie::load_v<kLanes>(weight + i);
    Accumulator<kLanes> out(aie::load_v<kLanes>(bias + i));
    out = aie::mac(aie::mac(out, normal.high, scale), normal.low, scale);
    aie::store_v(y + i, out.to_vector<bfloat16>());
  }
}

}  // namespace
}  // namespace flownpu

extern "C" {

// The sum is rounded to bf16 before its norm, because the next layer reads the rounded residual.
void add_layer_norm(const bfloat16* __restrict x, const bfloat16* __restrict residual,
                    const bfloat16* __restrict weight, const bfloat16* __restrict bias,
                    bfloat16* __restrict sum, bfloat16* __restrict y, std::int32_t rows,
                    std::int32_t n, std::int32_t epsilon) {
  event0();
  flownpu::set_conversion_modes();
  for (std::int32_t row = 0; row < rows; ++row, x += n, residual += n, sum += n, y += n) {
    flownpu::add(x, residual, sum, n);
    flownpu::normalize_row(sum, weight, bias, y, n, flownpu::float_of(epsilon));
  }
  event1();
}

}  // extern "C"
