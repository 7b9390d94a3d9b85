// SPDX-License-Identifier: Apache-2.0
// Gates of finished vectors, element by element:
//
//   geglu       y = gelu(gate) up, with GELU's tanh approximation
//   swiglu      y = silu(gate) up
//   gated_part  part = x sigmoid(gate), of part `index` of both, cut into parts of n
//
// Dataflow: f32 in between, rounded once. Layout: any, the same for all buffers. Callers, in
// aie/designs/: one_tile.py; of gated_part decode_layer/residual.py, for attention's output. GEMM,
// FusedDQP and the decode layer have the first two in their epilogue (epilogue.cc).
#include "aie/kernels/common/float_math.h"
#include "aie/kernels/kernels.h"

namespace flownpu {
namespace {

// y = function(gate) factor.
template <typename Function>
void gate(const bfloat16* gate, const bfloat16* factor, bfloat16* y, std::int32_t n,
          Function function) {
  event0();
  set_conversion_modes();
  AIE_PREPARE_FOR_PIPELINING
  for (std::int32_t i = 0; i < n; i += kLanes) {
    const Accumulator<kLanes> open = function(Accumulator<kLanes>(aie::load_v<kLanes>(gate + i)));
    const Bf16<kLanes> value = aie::load_v<kLanes>(factor + i);
    aie::store_v(y + i, multiply(split(open), value).to_vector<bfloat16>());
  }
  event1();
}

using Sum = Accumulator<kLanes>;

}  // namespace
}  // namespace flownpu

extern "C" {

void geglu(const bfloat16* __restrict gate, const bfloat16* __restrict up, bfloat16* __restrict y,
           std::int32_t n) {
  flownpu::gate(gate, up, y, n, [](const flownpu::Sum& x) { return flownpu::gelu(x); });
}

void swiglu(const bfloat16* __restrict gate, const bfloat16* __restrict up, bfloat16* __restrict y,
            std::int32_t n) {
  flownpu::gate(gate, up, y, n, [](const flownpu::Sum& x) { return flownpu::silu(x); });
}

void gated_part(const bfloat16* __restrict x, const bfloat16* __restrict gate,
                bfloat16* __restrict part, std::int32_t index, std::int32_t n) {
  flownpu::gate(gate + index * n, x + index * n, part, n,
                [](const flownpu::Sum& g) { return flownpu::sigmoid(g); });
}

}  // extern "C"
