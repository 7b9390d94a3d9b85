// SPDX-License-Identifier: Apache-2.0
// A plane of a tensor, transposed in tiles.
#pragma once

#include <algorithm>
#include <cstdint>

namespace flownpu::cpu {

// Rows and columns of a plane that are transposed together: 16 elements of 4 bytes are a cache
// line, and 16 lines read and 16 written stay in the first-level cache.
inline constexpr std::int64_t kTile = 16;

// to[row][column] = from[column][row]; a stride is the distance of two rows, in elements.
template <typename T>
void transpose(const T* from, std::int64_t from_stride, T* to, std::int64_t to_stride,
               std::int64_t rows, std::int64_t columns) {
  for (std::int64_t first_row = 0; first_row < rows; first_row += kTile) {
    const std::int64_t last_row = std::min(first_row + kTile, rows);
    for (std::int64_t first = 0; first < columns; first += kTile) {
      const std::int64_t last = std::min(first + kTile, columns);
      for (std::int64_t row = first_row; row < last_row; ++row) {
        for (std::int64_t column = first; column < last; ++column)
          to[row * to_stride + column] = from[column * from_stride + row];
      }
    }
  }
}

}  // namespace flownpu::cpu
