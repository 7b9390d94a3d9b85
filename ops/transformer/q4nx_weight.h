// SPDX-License-Identifier: Apache-2.0
// The Q4NX weight of a product in a graph, in any layout of ops/formats/q4nx.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/formats/q4nx.h"
#include "ops/nodes/node.h"

namespace flownpu::transformer {

struct Q4NXWeight {
  const std::byte* blocks = nullptr;
  q4nx::Layout layout;
  std::int64_t rows = 0;     // M
  std::int64_t columns = 0;  // K
  bool gated = false;        // the gate's M rows, padded to whole blocks, then the up projection's

  std::int64_t row_blocks() const { return q4nx::row_blocks(rows) * (gated ? 2 : 1); }
};

// Reads W of a Q4NXMatMul. Throws Error that names the node unless W is an initializer whose shape
// fits M, K and gating.
Q4NXWeight read_q4nx_weight(const Node& product);

}  // namespace flownpu::transformer
