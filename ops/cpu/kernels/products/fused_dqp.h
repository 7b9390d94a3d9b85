// SPDX-License-Identifier: Apache-2.0
// FusedDQP (Gemma3 paper, section 3.2.1) in AVX2 + FMA or in NEON: dequantisation and matrix-vector
// product in one pass.
//
// Dataflow: one row of blocks streams from memory once, group by group; codes become bytes (or f32)
// in registers and are multiplied there by COUNT rows of activations. At the end of each group of
// 32 columns the group's dots are scaled into the totals. Nothing is written before the 32 x COUNT
// results. Layout: see q4nx_avx2.h and neon/q4nx.h, which have all intrinsics. Caller:
// q4nx_matmul_codes.h, for few rows of activations.
#pragma once

#include "ops/cpu/kernels/products/fetch_ahead.h"
#if defined(__AVX2__)
#include "ops/cpu/kernels/products/q4nx_avx2.h"
#else
#include "ops/cpu/kernels/products/neon/q4nx.h"
#endif

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// Up to this many rows of activations are multiplied without unpacking codes into the scratch.
constexpr int kFusedRows = 4;

// Widens n columns, a multiple of 8, of the bf16 activations of some rows: out[rows][n].
inline void widen(const RoundedActivations& a, std::int64_t row, std::int64_t rows,
                  std::int64_t column, std::int64_t n, float* out) {
  for (std::int64_t r = 0; r < rows; ++r, out += n) {
    const auto* x = static_cast<const std::uint16_t*>(a.values) + (row + r) * a.padded_k + column;
    for (std::int64_t i = 0; i < n; i += kLanes) store(out + i, BFloat16::load_vector(x + i));
  }
}

// Calls function(values in f32, column) for the 32 columns of a strip's group.
template <q4nx::Layout LAYOUT, typename Function>
void for_each_column(const Q4NXRows& weight, std::int64_t group, int strip,
                     const Function& function) {
  for (int quad = 0; quad < kGroup / 4; ++quad) {
    const FourColumns<LAYOUT> four(weight, group, strip, quad);
    function(four.template column<0>(), quad * 4);
    function(four.template column<1>(), quad * 4 + 1);
    function(four.template column<2>(), quad * 4 + 2);
    function(four.template column<3>(), quad * 4 + 3);
  }
}

template <int COUNT>
void store_strips(const Rows (&total)[kStrips][COUNT], float* out) {
  for (int strip = 0; strip < kStrips; ++strip) {
    for (int r = 0; r < COUNT; ++r) {
      store_rows(total[strip][r], out + r * q4nx::kBlockRows + strip * kStripRows);
    }
  }
}

template <int COUNT, q4nx::Layout LAYOUT>
void fused_dqp_int8(Q4NXRows weight, const RoundedActivations& a, std::int64_t first, float* out) {
  weight.layout = LAYOUT;
  const auto* x = static_cast<const std::int8_t*>(a.values) + first * a.padded_k;
  const float* scales = a.scales + first * a.groups;
  const float* sums = a.sums + first * a.groups;
  constexpr int kQuads = kGroup / 4;
  // Lines of the weight that are fetched for each two quads of a strip.
  constexpr std::int64_t kLines = kGroupBytes<LAYOUT> / Fetch::kLine / (kStrips * kQuads / 2);
  Rows total[kStrips][COUNT];
  for (std::int64_t group = 0; group < weight.stored_groups;
       ++group, x += kGroup, ++scales, ++sums) {
    Fetch ahead = lines_ahead<LAYOUT>(weight, group);
    if constexpr (LAYOUT.has_table) {
      // The products through a table take longer than their lines: 1.02 of this one's time if these
      // come one at a time.
      ahead = fetch_ahead<LAYOUT>(weight, group);
      ahead.rest();
    }
    with_dots<LAYOUT>(weight, group, [&]<typename Dots>() {
      for (int strip = 0; strip < kStrips; ++strip) {
        Dots dot[COUNT];
        const auto multiply = [&](int quad) {
          const ByteCodes codes = byte_codes<LAYOUT>(weight, group, strip, quad);
          for (int r = 0; r < COUNT; ++r) dot_int8(dot[r], codes, x + r * a.padded_k + quad * 4);
        };
        // Two steps at once. If the loop is fully unrolled, GCC orders its additions so that the
        // operands do not fit 16 registers: a quarter of the speed.
#pragma GCC unroll 1
        for (int quad = 0; quad < kQuads; quad += 2) {
          for (std::int64_t line = 0; line < kLines; ++line) ahead.step<0>();
          multiply(quad);
          multiply(quad + 1);
        }
        const auto [scale, minimum] = load_parameters(weight, group, strip);
        for (int r = 0; r < COUNT; ++r) {
          const std::int64_t at = r * a.groups;
          add_group(total[strip][r], dot[r], scales[at], scale, minimum, sums[at]);
        }
      }
    });
    ahead.rest<0>();
  }
  store_strips(total, out);
}

template <int COUNT, q4nx::Layout LAYOUT>
void fused_dqp_bf16(Q4NXRows weight, const RoundedActivations& a, std::int64_t first, float* out) {
  weight.layout = LAYOUT;
  const float* sums = a.sums + first * a.groups;
  Rows total[kStrips][COUNT];
  for (std::int64_t group = 0; group < weight.stored_groups; ++group, ++sums) {
    fetch_ahead<LAYOUT>(weight, group).rest();
    alignas(32) float x[COUNT * kGroup];
    widen(a, first, COUNT, group * kGroup, kGroup, x);
    for (int strip = 0; strip < kStrips; ++strip) {
      Rows dot[COUNT];
      for_each_column<LAYOUT>(weight, group, strip, [&](Rows codes, int column) {
        for (int r = 0; r < COUNT; ++r) dot_float(dot[r], codes, x + r * kGroup + column);
      });
      const auto [scale, minimum] = load_parameters(weight, group, strip);
      for (int r = 0; r < COUNT; ++r) {
        add_group(total[strip][r], dot[r], scale, minimum, sums[r * a.groups]);
      }
    }
  }
  store_strips(total, out);
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
