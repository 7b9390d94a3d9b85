// SPDX-License-Identifier: Apache-2.0
// Q4NX weights of a graph, in any layout of ops/formats/q4nx.h, and the wide blocks that the array
// reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "ops/formats/q4nx.h"
#include "ops/nodes/node.h"

namespace flownpu::npu {

struct Q4NXWeight {
  const std::byte* blocks = nullptr;
  q4nx::Layout layout;
  std::int64_t rows = 0;     // M
  std::int64_t columns = 0;  // K
  bool gated = false;        // the gate's rows of blocks, then the up projection's: M rows each

  std::int64_t row_blocks() const { return q4nx::row_blocks(rows) * (gated ? 2 : 1); }
  // Bytes of a row of blocks in the wide layout.
  std::size_t wide_row_bytes() const {
    return static_cast<std::size_t>(q4nx::kWide.row_bytes(columns));
  }
};

// W of a Q4NXMatMul. Throws Error that names the node if W is no initializer of its M and K.
Q4NXWeight read_q4nx_weight(const Node& product);

// w[m, k]; of a gated weight the gate's.
float value_at(const Q4NXWeight& weight, std::int64_t m, std::int64_t k);

// Row of blocks `number` in wide blocks: the bytes that packing the same codes, scales and minima
// in wide blocks would give. `wide`: wide_row_bytes().
void write_wide_row(const Q4NXWeight& weight, std::int64_t number, std::span<std::byte> wide);

}  // namespace flownpu::npu
