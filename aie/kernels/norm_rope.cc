// SPDX-License-Identifier: Apache-2.0
// QK-norm and rotary position embedding of one token's heads in one pass:
//     x' = x / sqrt(mean(x^2) + epsilon) weight
//     (y_a, y_b) = (x'_a cos - x'_b sin, x'_b cos + x'_a sin),  pairs (i, i + d/2)
//
// Dataflow: a head's mean first, then 16 pairs at a time; x' stays in f32, so that a head is
// rounded once on its way to the KV cache. Layout: x, y lines(heads, d); the table holds cos[d/2],
// then sin[d/2], of the token's position. Callers: decode_layer/attention.py and norm_rope.py in
// aie/designs/.
#include "aie/kernels/common/normalize.h"
#include "aie/kernels/kernels.h"

extern "C" {

void rms_norm_rope(const bfloat16* x, const bfloat16* __restrict weight,
                   const bfloat16* __restrict table, bfloat16* y, std::int32_t heads,
                   std::int32_t d, std::int32_t epsilon) {
  using namespace flownpu;
  event0();
  set_conversion_modes();
  const std::int32_t half = d / 2;
  for (std::int32_t head = 0; head < heads; ++head, x += d, y += d) {
    const auto inverse = inverse_rms(x, d, float_of(epsilon));
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
  event1();
}

}  // extern "C"
