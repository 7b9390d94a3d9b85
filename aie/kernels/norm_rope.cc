// SPDX-License-Identifier: Apache-2.0
// QK-norm and rotary position embedding of one token's heads in one pass:
//     x' = x / sqrt(mean(x^2) + epsilon) weight,  mean of a head, or of all heads
//     (y_a, y_b) = (x'_a cos - x'_b sin, x'_b cos + x'_a sin),  pairs (i, i + d/2)
//
// Dataflow: a head's mean first, then 16 pairs at a time; x' stays in f32, so that a head is
// rounded once on its way to the KV cache. Heads of one norm come twice: first square_sums takes
// them, batch by batch. Layout: x, y lines(heads, d); the table holds cos[d/2],
// then sin[d/2], of the token's position. Caller: aie/designs/decode_layer/attention.py.
#include "aie/kernels/common/normalize.h"
#include "aie/kernels/kernels.h"

namespace flownpu {
namespace {

// One head; `inverse`: 1 / sqrt(mean(x^2) + epsilon).
void turn_head(const bfloat16* x, const Parts<kLanes>& inverse, const bfloat16* weight,
               const bfloat16* table, bfloat16* y, std::int32_t d) {
  const std::int32_t half = d / 2;
  AIE_PREPARE_FOR_PIPELINING
  for (std::int32_t i = 0; i < half; i += kLanes) {
    const auto a = split(normalize(x + i, inverse, weight + i));
    const auto b = split(normalize(x + half + i, inverse, weight + half + i));
    const Bf16<kLanes> cosine = aie::load_v<kLanes>(table + i);
    const Bf16<kLanes> sine = aie::load_v<kLanes>(table + half + i);
    const auto first = aie::msc(aie::msc(multiply(a, cosine), b.high, sine), b.low, sine);
    const auto second = aie::mac(aie::mac(multiply(b, cosine), a.high, sine), a.low, sine);
    aie::store_v(y + i, first.to_vector<bfloat16>());
    aie::store_v(y + half + i, second.to_vector<bfloat16>());
  }
}

}  // namespace
}  // namespace flownpu

extern "C" {

void rms_norm_rope(const bfloat16* x, const bfloat16* __restrict weight,
                   const bfloat16* __restrict table, bfloat16* y, std::int32_t heads,
                   std::int32_t d, std::int32_t epsilon) {
  using namespace flownpu;
  event0();
  set_conversion_modes();
  for (std::int32_t head = 0; head < heads; ++head, x += d, y += d)
    turn_head(x, inverse_rms(x, d, float_of(epsilon)), weight, table, y, d);
  event1();
}

void square_sums(const bfloat16* __restrict x, float* __restrict sums, std::int32_t n,
                 std::int32_t batch) {
  using namespace flownpu;
  event0();
  const Accumulator<kLanes> before =
      batch == 0 ? aie::zeros<accfloat, kLanes>() : Accumulator<kLanes>(aie::load_v<kLanes>(sums));
  aie::store_v(sums, add_squares(before, x, n).to_vector<float>());
  event1();
}

void all_norm_rope(const bfloat16* x, const bfloat16* __restrict weights,
                   const bfloat16* __restrict table, const float* __restrict sums, bfloat16* y,
                   std::int32_t heads, std::int32_t d, std::int32_t first, std::int32_t n,
                   std::int32_t epsilon) {
  using namespace flownpu;
  event0();
  set_conversion_modes();
  const auto inverse = inverse_of_sum(aie::load_v<kLanes>(sums), n, float_of(epsilon));
  const bfloat16* weight = weights + first * d;
  for (std::int32_t head = 0; head < heads; ++head, x += d, weight += d, y += d)
    turn_head(x, inverse, weight, table, y, d);
  event1();
}

}  // extern "C"
