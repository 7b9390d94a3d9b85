// SPDX-License-Identifier: Apache-2.0
// Many rows of int8 activations times unpacked codes, by dot products of four columns.
//
// Scratch: [strip][four columns][the 64 bytes that store_codes writes].
#pragma once

#include "ops/cpu/kernels/products/fused_dqp.h"
#include "ops/cpu/kernels/products/group_range.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

template <q4nx::Layout LAYOUT>
void unpack_int8(const GroupRange& range, std::byte* unpacked) {
  const Q4NXRows weight = range.rows<LAYOUT>();
  for (int strip = 0; strip < kStrips; ++strip) {
    for (std::int64_t g = range.first_group; g < range.first_group + range.groups; ++g) {
      for (int quad = 0; quad < kGroup / 4; ++quad, unpacked += 64)
        store_codes(byte_codes<LAYOUT>(weight, g, strip, quad), unpacked);
    }
  }
}

// COUNT rows of activations from `row` times a range of one strip; `out` begins at the strip's
// rows.
template <int COUNT, q4nx::Layout LAYOUT>
void tile_int8(const GroupRange& range, const std::byte* unpacked, int strip,
               const RoundedActivations& a, std::int64_t row, float* out) {
  const Q4NXRows weight = range.rows<LAYOUT>();
  const std::int64_t first = range.first_group;
  const auto* x = static_cast<const std::int8_t*>(a.values) + row * a.padded_k + first * kGroup;
  const float* scales = a.scales + row * a.groups + first;
  const float* sums = a.sums + row * a.groups + first;
  Rows total[COUNT];
  if (first > 0) {
    for (int r = 0; r < COUNT; ++r) total[r] = load_rows(out + r * q4nx::kBlockRows);
  }
  for (std::int64_t g = 0; g < range.groups; ++g, ++scales, ++sums) {
    with_dots<LAYOUT>(weight, first + g, [&]<typename Dots>() {
      Dots dot[COUNT];
      const auto multiply = [&](int quad) {
        const ByteCodes codes = load_codes(unpacked + quad * 64);
        for (int r = 0; r < COUNT; ++r) dot_int8(dot[r], codes, x + r * a.padded_k + quad * 4);
      };
      // Two steps at once, as in fused_dqp.h.
#pragma GCC unroll 1
      for (int quad = 0; quad < kGroup / 4; quad += 2) {
        multiply(quad);
        multiply(quad + 1);
      }
      const auto [scale, minimum] = load_parameters(weight, first + g, strip);
      for (int r = 0; r < COUNT; ++r) {
        add_group(total[r], dot[r], scales[r * a.groups], scale, minimum, sums[r * a.groups]);
      }
    });
    unpacked += kGroup / 4 * 64;
    x += kGroup;
  }
  for (int r = 0; r < COUNT; ++r) store_rows(total[r], out + r * q4nx::kBlockRows);
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
