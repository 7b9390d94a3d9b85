// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding of one token's heads:
//     (y_a, y_b) = (x_a cos - x_b sin, x_b cos + x_a sin)
// for the pairs (i, i + d/2), i < d/2.
//
// Dataflow: 16 pairs at a time, products in f32. Layout: x, y lines(heads, d); the table holds
// cos[d/2], then sin[d/2], of the token's position. Callers: one_tile.py and
// decode_layer/attention.py in aie/designs/.
#include "aie/kernels/common/float_math.h"
#include "aie/kernels/kernels.h"

using namespace flownpu;

extern "C" {

void rope(const bfloat16* x, const bfloat16* __restrict table, bfloat16* y, std::int32_t heads,
          std::int32_t d) {
  event0();
  set_conversion_modes();
  const std::int32_t half = d / 2;
  for (std::int32_t head = 0; head < heads; ++head, x += d, y += d) {
    AIE_PREPARE_FOR_PIPELINING
    for (std::int32_t i = 0; i < half; i += kLanes) {
      const Bf16<kLanes> a = aie::load_v<kLanes>(x + i);
      const Bf16<kLanes> b = aie::load_v<kLanes>(x + half + i);
      const Bf16<kLanes> cosine = aie::load_v<kLanes>(table + i);
      const Bf16<kLanes> sine = aie::load_v<kLanes>(table + half + i);
      aie::store_v(y + i, aie::msc(aie::mul(a, cosine), b, sine).to_vector<bfloat16>());
      aie::store_v(y + half + i, aie::mac(aie::mul(b, cosine), a, sine).to_vector<bfloat16>());
    }
  }
  event1();
}

}  // extern "C"
