// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding of one token's heads:
//     (y_a, y_b) = (x_a cos - x_b sin, x_b cos + x_a sin)
// for the pairs (i, i + d/2) (rope) or (2i, 2i + 1) (rope_interleaved), i < d/2.
//
// Dataflow: 16 pairs at a time, products in f32. Layout: x, y lines(heads, d); the table holds
// cos[d/2], then sin[d/2], of the token's position. Callers: vector_operators.py, norm_rope.py
// and decode_layer/attention.py in aie/designs/.
#include "aie/kernels/common/float_math.h"
#include "aie/kernels/kernels.h"

namespace flownpu {
namespace {

struct Pair {
  Bf16<kLanes> a, b;
};

Pair rotate(const Pair& x, const bfloat16* cosines, const bfloat16* sines) {
  const Bf16<kLanes> cosine = aie::load_v<kLanes>(cosines);
  const Bf16<kLanes> sine = aie::load_v<kLanes>(sines);
  return {aie::msc(aie::mul(x.a, cosine), x.b, sine).to_vector<bfloat16>(),
          aie::mac(aie::mul(x.b, cosine), x.a, sine).to_vector<bfloat16>()};
}

}  // namespace
}  // namespace flownpu

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
      const Pair in{aie::load_v<kLanes>(x + i), aie::load_v<kLanes>(x + half + i)};
      const Pair out = rotate(in, table + i, table + half + i);
      aie::store_v(y + i, out.a);
      aie::store_v(y + half + i, out.b);
    }
  }
  event1();
}

void rope_interleaved(const bfloat16* x, const bfloat16* __restrict table, bfloat16* y,
                      std::int32_t heads, std::int32_t d) {
  event0();
  set_conversion_modes();
  const std::int32_t half = d / 2;
  for (std::int32_t head = 0; head < heads; ++head, x += d, y += d) {
    AIE_PREPARE_FOR_PIPELINING
    for (std::int32_t i = 0; i < half; i += kLanes) {
      const Bf16<2 * kLanes> pairs = aie::load_v<2 * kLanes>(x + 2 * i);
      const Pair in{aie::filter_even(pairs), aie::filter_odd(pairs)};
      const Pair out = rotate(in, table + i, table + half + i);
      const auto [first, second] = aie::interleave_zip(out.a, out.b, 1);
      aie::store_v(y + 2 * i, aie::concat(first, second));
    }
  }
  event1();
}

}  // extern "C"
