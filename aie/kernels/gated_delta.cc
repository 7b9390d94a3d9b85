// SPDX-License-Identifier: Apache-2.0
// One token of the gated delta rule (Yang et al., "Gated Delta Networks", 2024) in a head whose
// state S [dk, dv] stays in the tile:
//
//   S' = a S + k delta^T,  delta = b (v - a S^T k),  y = S'^T q = a S^T q + (k q) delta
//
// Dataflow: columns of S are independent, so 32 of them are lanes: a pass over their rows gives
// S^T k and S^T q, a second one writes S'. Layout: x: q [dk], k [dk], v [dv], then in f32 a and b,
// with room for eight; S in lines. q is scaled, and k of length one, before. Caller:
// aie/designs/gated_delta.py.
//
// Arithmetic: S is rounded to bf16 once a token, to nearest even; y is of S' before that. Products
// with bf16 are exact, a, b and delta are split in two.
#include <aie_api/aie.hpp>
#include <cstdint>

#include "aie/kernels/common/float_math.h"
#include "aie/kernels/kernels.h"

namespace flownpu {
namespace {

constexpr std::int32_t kColumns = 32;

float product(const bfloat16* a, const bfloat16* b, std::int32_t n) {
  Accumulator<kLanes> sum = aie::zeros<accfloat, kLanes>();
  for (std::int32_t i = 0; i < n; i += kLanes)
    sum = aie::mac(sum, aie::load_v<kLanes>(a + i), aie::load_v<kLanes>(b + i));
  return aie::reduce_add(sum.to_vector<float>());
}

}  // namespace
}  // namespace flownpu

extern "C" {

void gated_delta(const bfloat16* __restrict x, bfloat16* __restrict state, bfloat16* __restrict y,
                 std::int32_t dk, std::int32_t dv) {
  using namespace flownpu;
  event0();
  set_conversion_modes();
  const bfloat16* q = x;
  const bfloat16* k = q + dk;
  const bfloat16* v = k + dk;
  const auto* rates = reinterpret_cast<const float*>(v + dv);
  const auto decay = broadcast_parts<kColumns>(rates[0]);
  const auto beta = broadcast_parts<kColumns>(rates[1]);
  const auto kq = broadcast_parts<kColumns>(product(k, q, dk));
  for (std::int32_t column = 0; column < dv; column += kColumns) {
    Accumulator<kColumns> of_k = aie::zeros<accfloat, kColumns>();
    Accumulator<kColumns> of_q = aie::zeros<accfloat, kColumns>();
    AIE_PREPARE_FOR_PIPELINING
    for (std::int32_t i = 0; i < dk; ++i) {
      const Bf16<kColumns> row = aie::load_v<kColumns>(state + i * dv + column);
      of_k = aie::mac(of_k, row, k[i]);
      of_q = aie::mac(of_q, row, q[i]);
    }
    const Bf16<kColumns> value = aie::load_v<kColumns>(v + column);
    const Accumulator<kColumns> missing =
        multiply_subtract(Accumulator<kColumns>(value), split(of_k), decay);
    const auto delta = split(multiply(split(missing), beta));
    const Accumulator<kColumns> made = multiply_add(multiply(split(of_q), decay), delta, kq);
    aie::store_v(y + column, made.to_vector<bfloat16>());
    AIE_PREPARE_FOR_PIPELINING
    for (std::int32_t i = 0; i < dk; ++i) {
      bfloat16* at = state + i * dv + column;
      const Bf16<kColumns> row = aie::load_v<kColumns>(at);
      Accumulator<kColumns> next = multiply(decay, row);
      next = aie::mac(next, delta.high, k[i]);
      next = aie::mac(next, delta.low, k[i]);
      aie::store_v(at, next.to_vector<bfloat16>());
    }
  }
  event1();
}

}  // extern "C"
