// SPDX-License-Identifier: Apache-2.0
// SwiGLU of finished projections: y = silu(gate) up.
//
// Dataflow: element by element, f32 in between, rounded once. Layout: any, the same for all
// buffers. Caller: aie/designs/vector_operators.py; GEMM, FusedDQP and the decode layer have it in
// their epilogue (epilogue.cc).
#include "aie/kernels/common/float_math.h"
#include "aie/kernels/kernels.h"

extern "C" {

void swiglu(const bfloat16* __restrict gate, const bfloat16* __restrict up, bfloat16* __restrict y,
            std::int32_t n) {
  using namespace flownpu;
  event0();
  set_conversion_modes();
  AIE_PREPARE_FOR_PIPELINING
  for (std::int32_t i = 0; i < n; i += kLanes) {
    const Accumulator<kLanes> active = silu(Accumulator<kLanes>(aie::load_v<kLanes>(gate + i)));
    const Bf16<kLanes> factor = aie::load_v<kLanes>(up + i);
    aie::store_v(y + i, multiply(split(active), factor).to_vector<bfloat16>());
  }
  event1();
}

}  // extern "C"
