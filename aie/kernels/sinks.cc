// SPDX-License-Identifier: Apache-2.0
// Attention sinks: before its first chunk of keys, a head's running maximum m and denominator l
// count one more key, whose value is 0 and whose score t is the head's sink. m is t rounded up to
// an integer, and l = 2^(t - m), as after a chunk with that key alone (common/attention.h).
//
// Dataflow: the rows of a head, `queries` one after the other, get its m and l, which the host has
// computed (ops/npu/nodes/sinks.h). Layout: from `element` of x on m f32[heads], l f32[heads],
// four numbers after the other four `step` numbers on: 4 in lines, 32 in the first row of
// tiled(). state: f32, where m begins at `maxima` and l at `sums`. Callers: aie/designs/flow_kv.py,
// flow_qkv.py, decode_layer/split.py.
#include <aie_api/aie.hpp>
#include <cstdint>

#include "aie/kernels/kernels.h"

extern "C" {

void attention_sinks(const bfloat16* __restrict x, float* __restrict state, std::int32_t element,
                     std::int32_t step, std::int32_t maxima, std::int32_t sums, std::int32_t heads,
                     std::int32_t queries) {
  event0();
  const auto* given = reinterpret_cast<const float*>(x + element);
  for (std::int32_t i = 0; i < 2 * heads; ++i) {
    float* rows = state + (i < heads ? maxima + i * queries : sums + (i - heads) * queries);
    const float number = given[i / 4 * step + i % 4];
    for (std::int32_t query = 0; query < queries; ++query) rows[query] = number;
  }
  event1();
}

}  // extern "C"
