// SPDX-License-Identifier: Apache-2.0
// FusedDQP's prefetching, on every x86 processor.
#pragma once

#include <cstdint>

#include "ops/cpu/processor.h"
#include "ops/cpu/q4nx_rows.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// Always inline: GCC takes a function that only fetches for one without effect.
// LOCALITY is __builtin_prefetch's: 0 past the outer caches, 2 into L2.
template <int LOCALITY>
[[gnu::always_inline]] inline void fetch_group(const Q4NXRows& weight, std::int64_t group) {
  constexpr std::int64_t kLine = 64;
  // 640, or 576 without minima.
  const std::int64_t bytes = weight.layout.block_bytes() >> weight.layout.group_bits;
  const std::uint8_t* at = weight.bytes + group * bytes;
  for (std::int64_t line = 0; line < q4nx::kNarrow.block_bytes(); line += kLine)
    __builtin_prefetch(at + line, 0, LOCALITY);
}

// Fetches a group's bytes 16 groups after group `group` of a row of blocks: DRAM answers after some
// 100 ns, in which a thread that reads 20 GB/s takes 2 KB, and the rest of these 10 KB evens out
// its waits. Past the outer caches, which hold what is read again.
//
// The weight is fetched in the order of its bytes, whatever the order of their use, and on past the
// end of the row: so, on a Zen 5, two threads multiplied one row of activations with wide blocks at
// 42-45 GB/s; group by group, or jumping over the padding of K = 1152, at 30-38, and without at
// 31-35. With narrow blocks 4 to 64 groups ahead differed by 7 % at most, without a trend. Asking
// for the 10 KB at once when a task begins, and for none beyond its end, made a decode step some
// 2 % longer.
//
// On two cores of a Granite Rapids, past the outer caches is 14 GB/s; into L1, 16 to 64 groups
// ahead, 21 to 23; into L2, 32 or 64 groups ahead, 24 to 26 of the 30 that memory gave.
[[gnu::always_inline]] inline void fetch_ahead(const Q4NXRows& weight, std::int64_t group) {
  if (kFetchIntoL2) {
    fetch_group<2>(weight, group + 32);
  } else {
    fetch_group<0>(weight, group + 16);
  }
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
