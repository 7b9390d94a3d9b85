// SPDX-License-Identifier: Apache-2.0
// FusedDQP (Gemma3 paper, section 3.2.1) in AVX-512: dequantisation and matrix-vector product in
// one pass.
//
// Dataflow: one row of blocks streams from memory once, 8 columns of 32 rows at a time (two zmm);
// their codes become bf16 pairs (or bytes) in registers and meet COUNT rows of activations there.
// At the end of each group of 32 columns the group's dots are scaled into the totals. Nothing is
// written before the 32 x COUNT results. Layout: see q4nx_avx512.h. Caller: q4nx_matmul.cc of this
// folder, for few rows of activations.
#pragma once

#include "ops/cpu/kernels.h"
#include "ops/cpu/kernels/q4nx_avx512.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// How far ahead of the codes that are multiplied the stream is fetched: two blocks. DRAM answers
// after some 100 ns, in which a thread that reads 20 GB/s takes 2 KB; the rest evens out its waits.
// One block and three made no difference that could be measured.
constexpr std::int64_t kGroupBytes =
    static_cast<std::int64_t>(q4nx::kBlockBytes) / q4nx::kGroupsPerBlock;
constexpr std::int64_t kAheadGroups = 2 * q4nx::kGroupsPerBlock;

// The weight's bytes in the order in which they lie in memory, whatever the order of their use:
// fetched so, K = 6912 was read at 98 % of the machine's bandwidth, and group by group (parts of
// four streams) at 85 %.
class Stream {
 public:
  Stream(const std::uint8_t* begin, std::int64_t groups)
      : next_(begin), end_(begin + groups * kGroupBytes) {
    for (std::int64_t group = 0; group < kAheadGroups; ++group) fetch_group();
  }

  // Always inline: GCC takes a function that only fetches for one without effect.
  [[gnu::always_inline]] void fetch_group() {
    constexpr std::int64_t kLine = 64;
    if (next_ == end_) return;
    // Weights are read once: into L1 and past the other caches, which hold what is read again.
    for (std::int64_t line = 0; line < kGroupBytes; line += kLine)
      _mm_prefetch(reinterpret_cast<const char*>(next_ + line), _MM_HINT_NTA);
    next_ += kGroupBytes;
  }

 private:
  const std::uint8_t* next_;
  const std::uint8_t* end_;
};

template <int COUNT>
void fused_dqp_bf16(const std::uint8_t* blocks, Stream& stream, const RoundedActivations& a,
                    std::int64_t first, float* out) {
  const __m512i table = bf16_of_code();
  const auto* x = static_cast<const std::uint16_t*>(a.values) + first * a.padded_k;
  const float* sums = a.sums + first * a.groups;
  Rows total[COUNT];
  for (std::int64_t group = 0; group < a.groups; ++group) {
    const std::int64_t within = group % q4nx::kGroupsPerBlock;
    const std::uint8_t* block = blocks + group / q4nx::kGroupsPerBlock * q4nx::kBlockBytes;
    const std::uint8_t* codes =
        block + q4nx::kCodeOffset + within * q4nx::kGroup * q4nx::kColumnBytes;
    stream.fetch_group();
    Rows dot[COUNT];
    for (int eight = 0; eight < 4; ++eight) {
      const __m512i strip0 = _mm512_loadu_si512(codes + eight * 64);
      const __m512i strip1 = _mm512_loadu_si512(codes + q4nx::kStripBytes + eight * 64);
      for (int pair = 0; pair < 4; ++pair) {
        const BFloat16Codes weights = bf16_codes(strip0, strip1, kColumnPairs[pair], table);
        for (int r = 0; r < COUNT; ++r) {
          const std::uint16_t* xr =
              x + r * a.padded_k + group * q4nx::kGroup + eight * 8 + pair * 2;
          dot_bf16(dot[r], weights.even, weights.odd, broadcast_activations(xr));
        }
      }
    }
    const Rows scale = load_group_rows(block + within * 64);
    const Rows minimum = load_group_rows(block + q4nx::kMinimumOffset + within * 64);
    for (int r = 0; r < COUNT; ++r)
      add_group(total[r], dot[r], scale, minimum, sums + r * a.groups + group);
  }
  for (int r = 0; r < COUNT; ++r) store_rows(total[r], out + r * q4nx::kBlockRows);
}

template <int COUNT>
void fused_dqp_int8(const std::uint8_t* blocks, Stream& stream, const RoundedActivations& a,
                    std::int64_t first, float* out) {
  const auto* x = static_cast<const std::int8_t*>(a.values) + first * a.padded_k;
  const float* scales = a.scales + first * a.groups;
  const float* sums = a.sums + first * a.groups;
  Rows total[COUNT];
  for (std::int64_t group = 0; group < a.groups; ++group) {
    const std::int64_t within = group % q4nx::kGroupsPerBlock;
    const std::uint8_t* block = blocks + group / q4nx::kGroupsPerBlock * q4nx::kBlockBytes;
    const std::uint8_t* codes =
        block + q4nx::kCodeOffset + within * q4nx::kGroup * q4nx::kColumnBytes;
    stream.fetch_group();
    IntegerRows dot[COUNT];
    for (int eight = 0; eight < 4; ++eight) {
      const __m512i strip0 = _mm512_loadu_si512(codes + eight * 64);
      const __m512i strip1 = _mm512_loadu_si512(codes + q4nx::kStripBytes + eight * 64);
      for (int quad = 0; quad < 2; ++quad) {
        const ByteCodes weights = byte_codes(strip0, strip1, kColumnQuads[quad]);
        for (int r = 0; r < COUNT; ++r) {
          const std::int8_t* xr = x + r * a.padded_k + group * q4nx::kGroup + eight * 8 + quad * 4;
          dot_int8(dot[r], weights.even, weights.odd, broadcast_activations(xr));
        }
      }
    }
    const Rows scale = load_group_rows(block + within * 64);
    const Rows minimum = load_group_rows(block + q4nx::kMinimumOffset + within * 64);
    for (int r = 0; r < COUNT; ++r) {
      const std::int64_t at = r * a.groups + group;
      add_group(total[r], dot[r], scales + at, scale, minimum, sums + at);
    }
  }
  for (int r = 0; r < COUNT; ++r) store_rows(total[r], out + r * q4nx::kBlockRows);
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
