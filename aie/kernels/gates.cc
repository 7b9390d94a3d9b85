// SPDX-License-Identifier: Apache-2.0
// The gate of attention's output: part = x sigmoid(gate), of part `index` of both, cut into parts
// of n.
//
// Dataflow: f32 in between, rounded once. Layout: any, the same for all buffers. Caller:
// aie/designs/decode_layer/residual.py. GeGLU and SwiGLU are epilogues (epilogue.cc).
#include "aie/kernels/common/float_math.h"
#include "aie/kernels/kernels.h"

using namespace flownpu;

extern "C" {

void gated_part(const bfloat16* __restrict x, const bfloat16* __restrict gate,
                bfloat16* __restrict part, std::int32_t index, std::int32_t n) {
  event0();
  set_conversion_modes();
  x += index * n;
  gate += index * n;
  AIE_PREPARE_FOR_PIPELINING
  for (std::int32_t i = 0; i < n; i += kLanes) {
    const Accumulator<kLanes> open = sigmoid(Accumulator<kLanes>(aie::load_v<kLanes>(gate + i)));
    const Bf16<kLanes> value = aie::load_v<kLanes>(x + i);
    aie::store_v(part + i, multiply(split(open), value).to_vector<bfloat16>());
  }
  event1();
}

}  // extern "C"
