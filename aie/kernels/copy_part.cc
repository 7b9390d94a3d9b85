// SPDX-License-Identifier: Apache-2.0
// Copies part `index` of a vector that is cut into parts of n: part = whole[index n .. (index + 1)
// n]; copy_into and copy_norms write it to a part of another vector.
//
// Dataflow: 32 elements at a time, and 16 that may be left. Layout: lines. In an array an entry has
// one type for each argument, so copies of two sizes need two names. Callers, all in aie/designs/:
// copy_part in copy.py, vector_operators.py and decode_layer/residual.py; copy_heads and copy_norms
// in decode_layer/attention.py; copy_into in decode_layer/residual.py.
#include <aie_api/aie.hpp>
#include <cstdint>

#include "aie/kernels/common/loops.h"
#include "aie/kernels/kernels.h"

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

void copy_norms(const bfloat16* __restrict from, bfloat16* __restrict to, std::int32_t from_index,
                std::int32_t to_index, std::int32_t n) {
  copy(from, to + to_index * n, from_index, n);
}

}  // extern "C"
