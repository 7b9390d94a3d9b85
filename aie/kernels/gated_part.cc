// SPDX-License-Identifier: Apache-2.0
// Opens part `index` of a vector that is cut into parts of n by a gate of each element:
//
//   part = x[index n .. (index + 1) n] sigmoid(gate[index n .. (index + 1) n])
//
// Dataflow: element by element, 16 lanes. Layout: lines. Caller:
// aie/designs/decode_layer/residual.py, on attention's output.
#include <aie_api/aie.hpp>
#include <cstdint>

#include "aie/kernels/common/float_math.h"
#include "aie/kernels/kernels.h"

extern "C" {

void gated_part(const bfloat16* __restrict x, const bfloat16* __restrict gate,
                bfloat16* __restrict part, std::int32_t index, std::int32_t n) {
  using namespace flownpu;
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
