// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/nodes/planes.h"

#include <cstring>

#include "ops/formats/numbers.h"
#include "ops/formats/q4nx_layouts.h"

namespace flownpu::npu {
namespace {

constexpr float kHighScale = 16;
constexpr float kHighMinimum = -128;

// Writes `factor` times each of a group's 32 scales.
void write_multiples(const std::byte* scales, float factor, std::byte* to) {
  for (std::int64_t at = 0; at < q4nx::kParameterBytes; at += 2) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, scales + at, 2);
    // Rows of padding have scales of 0 and get minima of 0, not -0.
    const float scale = from_bfloat16(bits);
    bits = to_bfloat16(scale == 0 ? 0.0F : factor * scale);
    std::memcpy(to + at, &bits, 2);
  }
}

}  // namespace

void write_planes(const std::byte* row, const q4nx::Layout& layout, std::int64_t columns,
                  std::byte* wide) {
  constexpr const q4nx::Layout& kWide = q4nx::kWide;
  std::memset(wide, 0, static_cast<std::size_t>(kWide.row_bytes(wide_columns(columns, true))));
  for (std::int64_t group = 0; group < q4nx::groups_of(columns); ++group) {
    const std::byte* scales = row + layout.scales_at(group);
    const std::int64_t high = wide_group(group, true);
    const std::int64_t low = high + kWide.groups_per_block();
    write_multiples(scales, kHighScale, wide + kWide.scales_at(high));
    write_multiples(scales, kHighMinimum, wide + kWide.scales_at(high) + kWide.minimum_offset());
    std::memcpy(wide + kWide.scales_at(low), scales, q4nx::kParameterBytes);
    if (layout.has_minima) {
      std::memcpy(wide + kWide.scales_at(low) + kWide.minimum_offset(),
                  scales + layout.minimum_offset(), q4nx::kParameterBytes);
    }
    for (std::int64_t column = 0; column < q4nx::kGroup; ++column) {
      for (std::int64_t i = 0; i < q4nx::kBlockRows; ++i) {
        const auto code =
            static_cast<unsigned>(q4nx::code_value(row, layout, group, i, column) + 128);
        const std::int64_t place = i / q4nx::kStripRows * kWide.strip_bytes() +
                                   column * q4nx::kColumnBytes + i % q4nx::kStripRows / 2;
        const unsigned shift = i % 2 == 0 ? 0 : 4;
        wide[kWide.codes_at(high) + place] |= std::byte(code >> 4U << shift);
        wide[kWide.codes_at(low) + place] |= std::byte((code & 15U) << shift);
      }
    }
  }
}

}  // namespace flownpu::npu
