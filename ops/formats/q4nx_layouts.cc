// SPDX-License-Identifier: Apache-2.0
#include "ops/formats/q4nx_layouts.h"

#include <cstring>

#include "ops/formats/numbers.h"

namespace flownpu::q4nx {
namespace {

void write_minima(const std::byte* scales, std::int64_t rows, std::byte* minima) {
  for (std::int64_t at = 0; at < rows * 2; at += 2) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, scales + at, 2);
    bits = to_bfloat16(kMinimumOfSymmetric * from_bfloat16(bits));
    std::memcpy(minima + at, &bits, 2);
  }
}

}  // namespace

void convert_row(const std::byte* from, const Layout& from_layout, std::byte* to,
                 const Layout& to_layout, std::int64_t columns, std::int64_t rows) {
  std::memset(to, 0, static_cast<std::size_t>(to_layout.row_bytes(columns)));
  for (std::int64_t group = 0; group < groups_of(columns); ++group) {
    const std::byte* scales = from + from_layout.scales_at(group);
    std::byte* made = to + to_layout.scales_at(group);
    std::memcpy(made, scales, kParameterBytes);
    if (to_layout.has_minima && from_layout.has_minima) {
      std::memcpy(made + to_layout.minimum_offset(), scales + from_layout.minimum_offset(),
                  kParameterBytes);
    } else if (to_layout.has_minima) {
      write_minima(scales, rows, made + to_layout.minimum_offset());
    }
    for (std::int64_t strip = 0; strip < 2; ++strip) {
      std::memcpy(to + to_layout.codes_at(group) + strip * to_layout.strip_bytes(),
                  from + from_layout.codes_at(group) + strip * from_layout.strip_bytes(),
                  kGroupStripBytes);
    }
  }
}

}  // namespace flownpu::q4nx
