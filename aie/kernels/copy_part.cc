// SPDX-License-Identifier: Apache-2.0
// Part `index` of a vector that is sent on in parts of n: part = whole[index n .. (index + 1) n];
// copy_into: into such a part of another vector.
//
// Dataflow: 32 elements at a time, and 16 that may be left. Layout: lines. An array's kernel has
// one type, so that what is copied in two sizes has two names. Callers: copy_part of
// decode_layer/array.py, norm_rope.py and vector_operators.py, copy_heads and copy_into of
// decode_layer/attention.py and array.py, all in aie/designs/.
#include <aie_api/aie.hpp>
#include <cstdint>

#include "aie/kernels/kernels.h"
#include "aie/kernels/common/loops.h"

namespace {

void copy(const bfloat16* __restrict whole, bfloat16* __restrict part, std::int32_t index,
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

}  // namespace

extern "C" {

void copy_part(const bfloat16* __restrict whole, bfloat16* __restrict part, std::int32_t index,
               std::int32_t n) {
  copy(whole, part, index, n);
}

void copy_heads(const bfloat16* __restrict whole, bfloat16* __restrict part, std::int32_t index,
                std::int32_t n) {
  copy(whole, part, index, n);
}

void copy_into(const bfloat16* __restrict from, bfloat16* __restrict to, std::int32_t from_index,
               std::int32_t to_index, std::int32_t n) {
  copy(from, to + to_index * n, from_index, n);
}

}  // extern "C"
