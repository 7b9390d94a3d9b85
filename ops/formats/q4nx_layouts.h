// SPDX-License-Identifier: Apache-2.0
// Converts Q4NX weights from one layout of blocks to another.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/formats/q4nx.h"

namespace flownpu::q4nx {

// Converts one row of blocks (32 rows of `columns` weights) to `to_layout`, with the same bytes
// that packing the codes, scales and minima in that layout would give. Minima that `from_layout`
// does not store are written (4 bits: -8 times the scales; those of the padding rows from `rows` on
// as 0, and not -0). `to_layout` may lack minima only if `from_layout` does, has codes of as
// many bits, and a table if `from_layout` has one.
void convert_row(const std::byte* from, const Layout& from_layout, std::byte* to,
                 const Layout& to_layout, std::int64_t columns, std::int64_t rows = kBlockRows);

// Multiplies the weights of a row of blocks: the scales and minima, rounded to bf16.
void multiply_row(std::byte* row, const Layout& layout, std::int64_t columns, float factor);

// The number that a code stands for, in units of its scale from its minimum on: the code itself, or
// its value in the table. `row`: of the 32 of a row of blocks; `column`: of the 32 of the group.
int code_value(const std::byte* row_of_blocks, const Layout& layout, std::int64_t group,
               std::int64_t row, std::int64_t column);

// Copies one of the 32 rows of a row of blocks, of 4 bits without a table, to one of another.
void copy_matrix_row(const std::byte* from, std::int64_t from_row, std::byte* to,
                     std::int64_t to_row, const Layout& layout, std::int64_t columns);

}  // namespace flownpu::q4nx
