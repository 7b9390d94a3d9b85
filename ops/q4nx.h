// SPDX-License-Identifier: Apache-2.0
// Q4NX (Gemma3 paper, section 3.1.1): where the bytes of a 4-bit weight W[M,K] are.
//
// W is cut into blocks of 32 rows x 256 columns, stored row of blocks by row of blocks. A block:
//     offset    0: 256 bf16 scales, [k / 32][row]
//     offset  512: 256 bf16 minima, [k / 32][row]
//     offset 1024: codes of rows 0-15, 256 columns x 8 bytes
//     offset 3072: codes of rows 16-31, likewise
// Byte j of a column holds row 2j of the 16 in its low nibble and row 2j+1 in its high nibble.
// w[row, k] = minimum + scale * code (eq. 3). M is padded to 32 and K to 256 with zeros.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/tensor.h"

namespace flownpu::q4nx {

inline constexpr std::int64_t kBlockRows = 32;
inline constexpr std::int64_t kBlockColumns = 256;
// Columns that share a scale and a minimum.
inline constexpr std::int64_t kGroup = 32;
inline constexpr int kLargestCode = 15;
inline constexpr std::int64_t kGroupsPerBlock = kBlockColumns / kGroup;

inline constexpr std::size_t kScaleBytes = kGroupsPerBlock * kBlockRows * 2;
inline constexpr std::size_t kMinimumOffset = kScaleBytes;
inline constexpr std::size_t kCodeOffset = 2 * kScaleBytes;
// 16 rows a strip, two codes a byte.
inline constexpr std::size_t kColumnBytes = 8;
inline constexpr std::size_t kStripBytes = kBlockColumns * kColumnBytes;
inline constexpr std::size_t kBlockBytes = kCodeOffset + 2 * kStripBytes;
static_assert(kBlockBytes == 5120, "32 x 256 weights at 5 bits");

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
constexpr std::int64_t row_blocks(std::int64_t m) { return ceil_div(m, kBlockRows); }
constexpr std::int64_t column_blocks(std::int64_t k) { return ceil_div(k, kBlockColumns); }

// The shape of the uint8 tensor that holds W[m,k].
inline Shape blocks_shape(std::int64_t m, std::int64_t k) {
  return Shape{row_blocks(m), column_blocks(k), static_cast<std::int64_t>(kBlockBytes)};
}

}  // namespace flownpu::q4nx
