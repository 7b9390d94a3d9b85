// SPDX-License-Identifier: Apache-2.0
// The wide blocks that the array reads, of Q4NX weights in any layout.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "ops/layers/q4nx_weight.h"

namespace flownpu::npu {

// Bytes of a row of blocks in the wide layout.
std::size_t wide_row_bytes(const layers::Q4NXWeight& weight);

// w[m, k]; of a gated weight the gate's.
float value_at(const layers::Q4NXWeight& weight, std::int64_t m, std::int64_t k);

// Row of blocks `number` in wide blocks: the bytes that packing the same codes, scales and minima
// in wide blocks would give. `wide`: wide_row_bytes(weight).
void write_wide_row(const layers::Q4NXWeight& weight, std::int64_t number,
                    std::span<std::byte> wide);

}  // namespace flownpu::npu
