// SPDX-License-Identifier: Apache-2.0
// Part `index` of a vector that is sent on in parts of n: part = whole[index n .. (index + 1) n].
//
// Dataflow: 32 elements at a time, and 16 that may be left. Layout: lines. Callers:
// decode_layer/array.py, norm_rope.py and vector_operators.py in aie/designs/.
#include <aie_api/aie.hpp>
#include <cstdint>

#include "aie/kernels/kernels.h"
#include "aie/kernels/loops.h"

extern "C" {

void copy_part(const bfloat16* __restrict whole, bfloat16* __restrict part, std::int32_t index,
               std::int32_t n) {
  constexpr std::int32_t kLine = 32;
  event0();
  whole += index * n;
  std::int32_t i = 0;
  AIE_PREPARE_FOR_PIPELINING
  for (; i + kLine <= n; i += kLine) {
    aie::store_v(part + i, aie::load_v<kLine>(whole + i));
  }
  if (i < n) aie::store_v(part + i, aie::load_v<kLine / 2>(whole + i));
  event1();
}

}  // extern "C"
