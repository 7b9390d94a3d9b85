// SPDX-License-Identifier: Apache-2.0
// Rounds heads to rows of an int8 KV cache (ops/definitions/int8_cache.py): d codes, then their
// scale in f32, and padding.
//
//     scale = bf16(max |x| / 127),   code = round(x / scale)
//
// Dataflow: a head's extremes first, then 16 elements at a time. A code is the low byte of x /
// scale + kRounder. The reciprocal errs by 1e-4, so that a code may be the second nearest where x /
// scale is within 127e-4 of the middle. The largest element has 8 significant bits; over 127 it is
// rounded down by 0.0026 at most (190 / 127 to 191 / 128), and so the largest code stays below 127
// (1 + 0.0026 + 1e-4) = 127.35, which is 127. Scales are 2^-60 or more. Layout: x lines(heads, d);
// rows [heads][5 d / 4].
// Caller: aie/designs/decode_layer/attention.py.
#include "aie/kernels/common/float_math.h"
#include "aie/kernels/kernels.h"

namespace flownpu {
namespace {

// bf16(max |x| / 127) in all lanes.
Bf16<kLanes> scale_of(const bfloat16* x, std::int32_t d) {
  Bf16<kLanes> most = aie::load_v<kLanes>(x);
  Bf16<kLanes> least = most;
  AIE_PREPARE_FOR_PIPELINING
  for (std::int32_t i = kLanes; i < d; i += kLanes) {
    const Bf16<kLanes> some = aie::load_v<kLanes>(x + i);
    most = aie::max(most, some);
    least = aie::min(least, some);
  }
  const Float<kLanes> above = Accumulator<kLanes>(most).to_vector<float>();
  const auto below = aie::sub(aie::zeros<accfloat, kLanes>(), least).to_vector<float>();
  const float largest = aie::reduce_max(aie::max(above, below));
  const auto raw = multiply(broadcast_parts<kLanes>(largest), broadcast_parts<kLanes>(1.0F / 127));
  constexpr float kSmallest = 0x1p-60F;  // reciprocal() takes no smaller number
  const auto limited = aie::max(raw.to_vector<float>(), aie::broadcast<float, kLanes>(kSmallest));
  return Accumulator<kLanes>(limited).to_vector<bfloat16>();
}

}  // namespace
}  // namespace flownpu

extern "C" {

void int8_rows(const bfloat16* __restrict x, std::uint8_t* __restrict rows, std::int32_t heads,
               std::int32_t d) {
  using namespace flownpu;
  event0();
  set_conversion_modes();
  const auto rounder = aie::broadcast<float, kLanes>(kRounder);
  for (std::int32_t head = 0; head < heads; ++head, x += d, rows += d + d / 4) {
    const Accumulator<kLanes> scale(scale_of(x, d));
    const auto inverse = split(reciprocal(scale));
    AIE_PREPARE_FOR_PIPELINING
    for (std::int32_t i = 0; i < d; i += kLanes) {
      const auto quotient = multiply(inverse, Bf16<kLanes>(aie::load_v<kLanes>(x + i)));
      const Float<kLanes> code = aie::add(quotient.to_vector<float>(), rounder);
      const auto words = aie::filter_even(code.cast_to<std::uint8_t>(), 2);
      aie::store_v(rows + i, aie::filter_even(words, 1));
    }
    aie::store_v(reinterpret_cast<float*>(rows + d), scale.to_vector<float>().extract<4>(0));
  }
  event1();
}

}  // extern "C"
