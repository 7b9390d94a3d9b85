// SPDX-License-Identifier: Apache-2.0
// Prefetching for products of a few rows. Distances were measured on x86 processors, never on
// Arm's.
#pragma once

#include <cstdint>

#include "ops/cpu/q4nx_rows.h"
#include "ops/system/processor_features.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// Bytes of a group of a weight. In wide blocks a group's scales and codes lie apart, and this is
// the group's share of a block.
template <q4nx::Layout LAYOUT>
constexpr std::int64_t kGroupBytes = LAYOUT.block_bytes() >> LAYOUT.group_bits;

// The order in which lines are fetched into L2 that are read one after the other. An Intel core's
// L2 fetches by itself only within a page, so each page probably begins with a wait. So lines of
// kRegions neighbouring regions are fetched in turn, in the window of memory that follows the one
// being read.
//
// On two cores of an Emerald Rapids decode steps of Gemma3-1B took 0.75 to 0.88 of the time that
// they took with lines in order, 32 groups ahead (as other machines left more or less of the
// memory's speed); with regions of 4, 8, 32 and 64 KB 0.78 to 0.83, 0.77 to 0.81, 0.86 and 0.97;
// with 2 or 8 regions 0.81 to 0.95; into L1 0.85. A loop that only reads is 1.1 to 1.4 times as
// fast in four places at once.
constexpr std::uintptr_t kRegions = 4;
constexpr std::uintptr_t kRegionBytes = 16 << 10;
constexpr std::uintptr_t kWindowBytes = kRegions * kRegionBytes;

// Lines of a weight that are fetched one at a time, between other instructions: into L2 on Intel's
// processors, else into L1. An Intel core has 16 buffers for the lines that it waits for, from L2
// or from memory. Fetching a group's lines at once takes most of these buffers, and the computation
// waits for a free one. One line at a time, two cores of a Granite Rapids multiplied weights in
// pages of 2 MB with 1, 4, 5 and 8 rows in 0.84, 0.88, 0.76 and 0.87 of the time.
//
// Always inline: GCC removes calls of a function that only prefetches.
class Fetch {
 public:
  static constexpr std::int64_t kLine = 64;

  // `bytes` are whole lines, of a weight that is read in the order of its bytes (kStream), or only
  // these lines of it (kLines).
  enum Order : bool { kLines, kStream };
  Fetch(const std::uint8_t* begin, std::int64_t bytes, Order order = kLines)
      : next_(begin), end_(begin + bytes), order_(order) {}

  // Part `index` of `parts` of the lines.
  Fetch part(std::int64_t index, std::int64_t parts) const {
    const std::int64_t lines = (end_ - next_) / kLine;
    const std::uint8_t* begin = next_ + lines * index / parts * kLine;
    return {begin, next_ + lines * (index + 1) / parts * kLine - begin, order_};
  }
  // The same number of lines, `bytes` bytes further on.
  Fetch from(std::int64_t bytes) const { return {next_ + bytes, end_ - next_, order_}; }

  // Fetches the next line, if there is one. LEVEL is __builtin_prefetch's, where lines do not go
  // into L2: 3 is L1, 0 goes past the outer caches.
  template <int LEVEL = 3>
  [[gnu::always_inline]] void step() {
    if (next_ >= end_) return;
    if (kFetchIntoL2) {
      __builtin_prefetch(order_ == kStream ? in_turn(next_) : next_, 0, 2);
    } else {
      __builtin_prefetch(next_, 0, LEVEL);
    }
    next_ += kLine;
  }
  // Fetches all lines that are left.
  template <int LEVEL = 3>
  [[gnu::always_inline]] void rest() {
    while (next_ < end_) step<LEVEL>();
  }

 private:
  // Maps the lines of each window onto each other: the lines of a region follow kRegions apart.
  static const std::uint8_t* in_turn(const std::uint8_t* line) {
    const std::uintptr_t at = reinterpret_cast<std::uintptr_t>(line) % kWindowBytes;
    const std::uintptr_t index = at / kLine;
    return line - at + index % kRegions * kRegionBytes + index / kRegions * kLine;
  }

  const std::uint8_t* next_;
  const std::uint8_t* end_;
  Order order_;
};

// The lines to fetch while `bytes` bytes from `at` on are read, of a weight that is read in the
// order of its bytes; `distance` bytes ahead where they are not fetched in turn.
inline Fetch stream_ahead(const std::uint8_t* at, std::int64_t bytes, std::int64_t distance) {
  return {at + (kFetchIntoL2 ? static_cast<std::int64_t>(kWindowBytes) : distance), bytes,
          Fetch::kStream};
}

// Fetches what a product of a few rows reads 16 groups after group `group` of a row of blocks: DRAM
// answers after some 100 ns, in which a thread that reads 20 GB/s takes 2 KB, and the rest of these
// 10 KB evens out its waits. Goes past the outer caches, which are for data that is read again.
//
// The weight is fetched in the order of its bytes, not of their use, and on past the end of the
// row. On a Zen 5 two threads then multiplied one row of activations with wide blocks at 42-45
// GB/s. They reached 30-38 group by group or without the padding of K = 1152, and 31-35 without
// prefetching. With narrow blocks, distances of 4 to 64 groups differed by 7 % at most, without a
// trend. Asking for the 10 KB at once when a task begins, and for none beyond its end, made a
// decode step some 2 % longer.
//
// On two cores of a Granite Rapids, fetching past the outer caches gave 14 GB/s; into L1, 16 to 64
// groups ahead, 21 to 23; into L2, in the order of bytes and 32 or 64 groups ahead, 24 to 26 of the
// 30 that memory gave. With kFetchIntoL2 the lines are returned, for the caller to fetch.
template <q4nx::Layout LAYOUT>
[[gnu::always_inline]] inline Fetch fetch_ahead(const Q4NXRows& weight, std::int64_t group) {
  const std::uint8_t* bytes = weight.bytes + group * kGroupBytes<LAYOUT>;
  if (kFetchIntoL2) return stream_ahead(bytes, kGroupBytes<LAYOUT>, 0);
  for (std::int64_t line = 0; line < kGroupBytes<LAYOUT>; line += 64)
    __builtin_prefetch(bytes + 16 * kGroupBytes<LAYOUT> + line, 0, 0);
  return {bytes, 0};
}

// The lines that fused_dqp.h fetches while it multiplies int8 by group `group`, some before each
// part of the products, past the outer caches: those of the group that is 32 further on.
//
// On two cores of a Zen 3 that read 17 to 23 GB/s, a decode step of LFM2-1.2B took 0.90 of the time
// with a group's lines at once and 16 groups ahead, one of Qwen3.5-0.8B 0.94 to 0.97. Lines at once
// 32 groups ahead took 0.98, lines one at a time 16, 24 and 48 groups ahead 0.94, 0.91 and 0.93. A
// product that was 1.5 times as fast on cached weights gained nothing.
template <q4nx::Layout LAYOUT>
[[gnu::always_inline]] inline Fetch lines_ahead(const Q4NXRows& weight, std::int64_t group) {
  return stream_ahead(weight.bytes + group * kGroupBytes<LAYOUT>, kGroupBytes<LAYOUT>,
                      32 * kGroupBytes<LAYOUT>);
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
