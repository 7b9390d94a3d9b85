// SPDX-License-Identifier: Apache-2.0
// Rows of blocks of a Q4NX weight in memory, as kernels read them: 32 rows of W[M,K] each, in any
// layout of ops/formats/q4nx.h.
#pragma once

#include <cstdint>

#include "ops/formats/q4nx.h"

namespace flownpu::cpu {

struct Q4NXRows {
  // The first row of blocks.
  const std::uint8_t* bytes = nullptr;
  q4nx::Layout layout;
  // Bytes of a row of blocks, including the groups that pad its last block.
  std::int64_t row_bytes = 0;
  std::int64_t stored_groups = 0;

  Q4NXRows(const std::uint8_t* weight, const q4nx::Layout& blocks, std::int64_t k)
      : bytes(weight),
        layout(blocks),
        row_bytes(blocks.row_bytes(k)),
        stored_groups(blocks.stored_groups(k)) {}

  // The rows from the row of blocks `index` on.
  Q4NXRows from(std::int64_t index) const {
    Q4NXRows rows = *this;
    rows.bytes += index * row_bytes;
    return rows;
  }

  // For a group of 32 columns, in the first row of blocks: its 32 scales and its 32 minima in bf16
  // (null where the layout has none), and its codes: of 4 bits those of the 16 rows of a strip (0
  // or 1), of 8 bits all, strip 0.
  const std::uint8_t* scales(std::int64_t group) const { return bytes + layout.scales_at(group); }
  const std::uint8_t* minima(std::int64_t group) const {
    return layout.has_minima ? scales(group) + layout.minimum_offset() : nullptr;
  }
  const std::uint8_t* codes(std::int64_t group, int strip) const {
    return bytes + layout.codes_at(group) + strip * layout.strip_bytes();
  }
  // The 16 values of a group's codes, int8, in a layout that has a table.
  const std::uint8_t* table(std::int64_t group) const { return bytes + layout.table_at(group); }
};

}  // namespace flownpu::cpu
