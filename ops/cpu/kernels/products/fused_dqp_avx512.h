// SPDX-License-Identifier: Apache-2.0
// FusedDQP (Gemma3 paper, section 3.2.1) in AVX-512: dequantisation and matrix-vector product in
// one pass.
//
// Dataflow: one row of blocks streams from memory once, 8 columns of 32 rows at a time (two zmm, of
// 8-bit codes four); their codes become bf16 pairs (or bytes) in registers and are multiplied there
// by COUNT rows of activations. At the end of each group of 32 columns the group's dots are scaled
// into the totals. Nothing is written before the 32 x COUNT results. Layout: see q4nx_avx512.h.
// Caller: q4nx_matmul_avx512.h, for few rows of activations.
#pragma once

#include "ops/cpu/kernels.h"
#include "ops/cpu/kernels/products/fetch_ahead.h"
#include "ops/cpu/kernels/products/q4nx_avx512.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

template <int COUNT, q4nx::Layout LAYOUT>
void fused_dqp_bf16(Q4NXRows weight, const RoundedActivations& a, std::int64_t first, float* out) {
  weight.layout = LAYOUT;
  const auto* x = static_cast<const std::uint16_t*>(a.values) + first * a.padded_k;
  const float* sums = a.sums + first * a.groups;
  Rows total[COUNT];
  for (std::int64_t group = 0; group < weight.stored_groups; ++group) {
    Fetch lines = fetch_ahead<LAYOUT>(weight, group);
    Rows dot[COUNT];
    for (int eight = 0; eight < 4; ++eight) {
      const EightColumns<LAYOUT> columns(weight, group, eight);
      unrolled<4>([&]<int PAIR>() {
        lines.step();
        const BFloat16Codes weights = columns.template pair<PAIR>();
        for (int r = 0; r < COUNT; ++r) {
          const std::uint16_t* xr =
              x + r * a.padded_k + group * q4nx::kGroup + eight * 8 + PAIR * 2;
          dot_bf16(dot[r], weights.even, weights.odd, broadcast_activations(xr));
        }
      });
    }
    lines.rest();
    const auto [scale, minimum] = load_parameters(weight, group);
    for (int r = 0; r < COUNT; ++r)
      add_group(total[r], dot[r], scale, minimum, sums + r * a.groups + group);
  }
  for (int r = 0; r < COUNT; ++r) store_rows(total[r], out + r * q4nx::kBlockRows);
}

template <int COUNT, q4nx::Layout LAYOUT>
void fused_dqp_int8(Q4NXRows weight, const RoundedActivations& a, std::int64_t first, float* out) {
  // Lines of a group that are fetched while four of its columns are multiplied.
  constexpr int kQuadLines = LAYOUT.code_bits / 4;
  weight.layout = LAYOUT;
  const auto* x = static_cast<const std::int8_t*>(a.values) + first * a.padded_k;
  const float* scales = a.scales + first * a.groups;
  const float* sums = a.sums + first * a.groups;
  Rows total[COUNT];
  for (std::int64_t group = 0; group < weight.stored_groups; ++group) {
    Fetch lines = fetch_ahead<LAYOUT>(weight, group);
    IntegerRows dot[COUNT];
    for (int eight = 0; eight < 4; ++eight) {
      const EightColumns<LAYOUT> columns(weight, group, eight);
      unrolled<2>([&]<int QUAD>() {
        for (int line = 0; line < kQuadLines; ++line) lines.step();
        const ByteCodes weights = columns.template quad<QUAD>();
        for (int r = 0; r < COUNT; ++r) {
          const std::int8_t* xr = x + r * a.padded_k + group * q4nx::kGroup + eight * 8 + QUAD * 4;
          dot_int8(dot[r], weights.even, weights.odd, broadcast_activations(xr));
        }
      });
    }
    lines.rest();
    const auto [scale, minimum] = load_parameters(weight, group);
    for (int r = 0; r < COUNT; ++r) {
      const std::int64_t at = r * a.groups + group;
      add_group(total[r], dot[r], scales + at, scale, minimum, sums + at);
    }
  }
  for (int r = 0; r < COUNT; ++r) store_rows(total[r], out + r * q4nx::kBlockRows);
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
