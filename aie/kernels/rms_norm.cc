// SPDX-License-Identifier: Apache-2.0
// RMS normalisation, alone and with the residual connection on either side:
//     y = x / sqrt(mean(x^2) + epsilon) weight
//
// Dataflow: two passes over a row in L1, sums in f32. Layout: lines(rows, n); a row is a token, or
// a head of one (QK-norm). Callers: vector_operators.py and decode_layer/residual.py in
// aie/designs/.
#include "aie/kernels/common/normalize.h"
#include "aie/kernels/kernels.h"

using namespace flownpu;

extern "C" {

void rms_norm(const bfloat16* x, const bfloat16* __restrict weight, bfloat16* y, std::int32_t rows,
              std::int32_t n, std::int32_t epsilon) {
  event0();
  set_conversion_modes();
  for (std::int32_t row = 0; row < rows; ++row, x += n, y += n) {
    const auto inverse = inverse_rms(x, n, float_of(epsilon));
    AIE_PREPARE_FOR_PIPELINING
    for (std::int32_t i = 0; i < n; i += kLanes) {
      aie::store_v(y + i, normalize(x + i, inverse, weight + i).to_vector<bfloat16>());
    }
  }
  event1();
}

void rms_norm_add(const bfloat16* __restrict x, const bfloat16* __restrict weight,
                  const bfloat16* __restrict residual, bfloat16* __restrict y, std::int32_t rows,
                  std::int32_t n, std::int32_t epsilon) {
  event0();
  set_conversion_modes();
  for (std::int32_t row = 0; row < rows; ++row, x += n, residual += n, y += n) {
    const auto inverse = inverse_rms(x, n, float_of(epsilon));
    AIE_PREPARE_FOR_PIPELINING
    for (std::int32_t i = 0; i < n; i += kLanes) {
      const auto sum =
          aie::add(normalize(x + i, inverse, weight + i), aie::load_v<kLanes>(residual + i));
      aie::store_v(y + i, sum.to_vector<bfloat16>());
    }
  }
  event1();
}

// The sum is rounded to bf16 before its norm, because the next layer reads the rounded residual.
void add_rms_norm(const bfloat16* __restrict x, const bfloat16* __restrict residual,
                  const bfloat16* __restrict weight, bfloat16* __restrict sum,
                  bfloat16* __restrict y, std::int32_t rows, std::int32_t n, std::int32_t epsilon) {
  event0();
  set_conversion_modes();
  for (std::int32_t row = 0; row < rows; ++row, x += n, residual += n, sum += n, y += n) {
    add(x, residual, sum, n);
    const auto inverse = inverse_rms(sum, n, float_of(epsilon));
    AIE_PREPARE_FOR_PIPELINING
    for (std::int32_t i = 0; i < n; i += kLanes) {
      aie::store_v(y + i, normalize(sum + i, inverse, weight + i).to_vector<bfloat16>());
    }
  }
  event1();
}

}  // extern "C"
