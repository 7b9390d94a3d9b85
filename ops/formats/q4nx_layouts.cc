// SPDX-License-Identifier: Apache-2.0
#include "ops/formats/q4nx_layouts.h"

#include <cstring>

#include "ops/formats/numbers.h"

namespace flownpu::q4nx {
namespace {

void write_minima(const std::byte* scales, const Layout& layout, std::int64_t rows,
                  std::byte* minima) {
  if (layout.minimum_of_symmetric() == 0) return;
  for (std::int64_t at = 0; at < rows * 2; at += 2) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, scales + at, 2);
    bits = to_bfloat16(layout.minimum_of_symmetric() * from_bfloat16(bits));
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
      write_minima(scales, to_layout, rows, made + to_layout.minimum_offset());
    }
    if (to_layout.has_table) {
      std::memcpy(to + to_layout.table_at(group), from + from_layout.table_at(group), kTableBytes);
    }
    if (to_layout.code_bits == 8) {
      std::memcpy(to + to_layout.codes_at(group), from + from_layout.codes_at(group),
                  kBlockRows * kGroup);
      continue;
    }
    for (std::int64_t strip = 0; strip < 2; ++strip) {
      std::memcpy(to + to_layout.codes_at(group) + strip * to_layout.strip_bytes(),
                  from + from_layout.codes_at(group) + strip * from_layout.strip_bytes(),
                  kGroupStripBytes);
    }
  }
}

int code_value(const std::byte* row_of_blocks, const Layout& layout, std::int64_t group,
               std::int64_t row, std::int64_t column) {
  const std::byte* codes = row_of_blocks + layout.codes_at(group);
  if (layout.code_bits == 8)
    return static_cast<std::int8_t>(codes[Layout::byte_code_at(row, column)]);
  const std::int64_t place =
      row / kStripRows * layout.strip_bytes() + column * kColumnBytes + row % kStripRows / 2;
  const auto pair = std::to_integer<unsigned>(codes[place]);
  const unsigned code = row % 2 == 0 ? pair & 15U : pair >> 4U;
  if (!layout.has_table) return static_cast<int>(code);
  return static_cast<std::int8_t>(row_of_blocks[layout.table_at(group) + code]);
}

void multiply_row(std::byte* row, const Layout& layout, std::int64_t columns, float factor) {
  for (std::int64_t group = 0; group < groups_of(columns); ++group) {
    for (const std::int64_t at : {std::int64_t{0}, layout.minimum_offset()}) {
      if (at != 0 && !layout.has_minima) continue;
      std::byte* numbers = row + layout.scales_at(group) + at;
      for (std::int64_t i = 0; i < kParameterBytes; i += 2) {
        std::uint16_t bits = 0;
        std::memcpy(&bits, numbers + i, 2);
        bits = to_bfloat16(factor * from_bfloat16(bits));
        std::memcpy(numbers + i, &bits, 2);
      }
    }
  }
}

void copy_matrix_row(const std::byte* from, std::int64_t from_row, std::byte* to,
                     std::int64_t to_row, const Layout& layout, std::int64_t columns) {
  const auto code_at = [&](std::int64_t group, std::int64_t row) {
    return layout.codes_at(group) + row / kStripRows * layout.strip_bytes() + row % kStripRows / 2;
  };
  const auto shift = [](std::int64_t row) { return row % 2 * 4; };
  for (std::int64_t group = 0; group < groups_of(columns); ++group) {
    for (const std::int64_t at : {std::int64_t{0}, layout.minimum_offset()}) {
      if (at != 0 && !layout.has_minima) continue;
      const std::int64_t numbers = layout.scales_at(group) + at;
      std::memcpy(to + numbers + 2 * to_row, from + numbers + 2 * from_row, 2);
    }
    const std::byte* read = from + code_at(group, from_row);
    std::byte* written = to + code_at(group, to_row);
    for (std::int64_t column = 0; column < kGroup; ++column) {
      const std::byte code = (read[column * kColumnBytes] >> shift(from_row)) & std::byte{15};
      std::byte& pair = written[column * kColumnBytes];
      pair = (pair & ~(std::byte{15} << shift(to_row))) | (code << shift(to_row));
    }
  }
}

}  // namespace flownpu::q4nx
