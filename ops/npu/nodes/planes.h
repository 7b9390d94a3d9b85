// SPDX-License-Identifier: Apache-2.0
// The array multiplies codes of 4 bits. A weight of 8 bits is the sum of two of 4, its planes; for
// a code c from -128 to 127 (with a table, a value in it), scale s and minimum m:
//
//     m + s c = (-128 s + 16 s (floor(c / 16) + 8)) + (m + s (c mod 16))
//
// All numbers are exact in bf16. A row of blocks has a wide block (ops/formats/q4nx.h) of the high
// plane for each 256 columns, and behind it that of the low plane: it is a row of a weight of 4
// bits with twice as many columns.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/formats/q4nx.h"

namespace flownpu::npu {

// The columns, in a row of wide blocks, that a weight of `columns` columns takes.
constexpr std::int64_t wide_columns(std::int64_t columns, bool eight_bits) {
  if (!eight_bits) return columns;
  return 2 * q4nx::kWide.column_blocks(columns) * q4nx::kWide.block_columns();
}

// The place in such a row of a group of columns; of 8 bits, in the high plane.
constexpr std::int64_t wide_group(std::int64_t group, bool eight_bits) {
  const std::int64_t groups = q4nx::kWide.groups_per_block();
  return eight_bits ? group / groups * 2 * groups + group % groups : group;
}

// Writes a row of blocks of 8 bits, or with tables (32 rows of `columns` weights), as planes:
// kWide.row_bytes(wide_columns(columns, true)) bytes.
void write_planes(const std::byte* row, const q4nx::Layout& layout, std::int64_t columns,
                  std::byte* wide);

}  // namespace flownpu::npu
