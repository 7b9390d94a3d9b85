// SPDX-License-Identifier: Apache-2.0
// Q4NX weights from one layout of blocks to another.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/formats/q4nx.h"

namespace flownpu::q4nx {

// A row of blocks, 32 rows of `columns` weights, in `to_layout`: the bytes that packing the same
// codes, scales and minima so would give. Weights without minima get those that they stand for, -8
// times the scales; of the rows from `rows` on, which are padding, 0 (and not -0). A layout without
// minima is only made of one without.
void convert_row(const std::byte* from, const Layout& from_layout, std::byte* to,
                 const Layout& to_layout, std::int64_t columns, std::int64_t rows = kBlockRows);

}  // namespace flownpu::q4nx
