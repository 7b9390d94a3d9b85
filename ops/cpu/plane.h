// SPDX-License-Identifier: Apache-2.0
// A plane of a tensor, transposed in tiles; elements of 4 bytes 4 x 4 at a time, in registers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace flownpu::cpu {

// Rows and columns of a plane that are transposed together: 16 elements of 4 bytes are a cache
// line, and 16 lines read and 16 written stay in the first-level cache.
inline constexpr std::int64_t kTile = 16;

inline constexpr std::int64_t kSquare = 4;

// A square of 4 x 4 elements of 4 bytes.
inline void transpose_square(const std::byte* from, std::int64_t from_bytes, std::byte* to,
                             std::int64_t to_bytes) {
  typedef std::uint32_t Four __attribute__((vector_size(16)));
  Four x[kSquare];
  for (int i = 0; i < kSquare; ++i) std::memcpy(&x[i], from + i * from_bytes, sizeof(Four));
  const Four low0 = __builtin_shufflevector(x[0], x[1], 0, 4, 1, 5);
  const Four low1 = __builtin_shufflevector(x[2], x[3], 0, 4, 1, 5);
  const Four high0 = __builtin_shufflevector(x[0], x[1], 2, 6, 3, 7);
  const Four high1 = __builtin_shufflevector(x[2], x[3], 2, 6, 3, 7);
  x[0] = __builtin_shufflevector(low0, low1, 0, 1, 4, 5);
  x[1] = __builtin_shufflevector(low0, low1, 2, 3, 6, 7);
  x[2] = __builtin_shufflevector(high0, high1, 0, 1, 4, 5);
  x[3] = __builtin_shufflevector(high0, high1, 2, 3, 6, 7);
  for (int i = 0; i < kSquare; ++i) std::memcpy(to + i * to_bytes, &x[i], sizeof(Four));
}

// to[row][column] = from[column][row]; a stride is the distance of two rows, in elements.
template <typename T>
void transpose(const T* from, std::int64_t from_stride, T* to, std::int64_t to_stride,
               std::int64_t rows, std::int64_t columns) {
  for (std::int64_t first_row = 0; first_row < rows; first_row += kTile) {
    const std::int64_t last_row = std::min(first_row + kTile, rows);
    for (std::int64_t first = 0; first < columns; first += kTile) {
      const std::int64_t last = std::min(first + kTile, columns);
      std::int64_t square = first;
      if constexpr (sizeof(T) == 4) {
        for (; (last_row - first_row) % kSquare == 0 && square + kSquare <= last;
             square += kSquare) {
          for (std::int64_t row = first_row; row < last_row; row += kSquare) {
            transpose_square(reinterpret_cast<const std::byte*>(from + square * from_stride + row),
                             from_stride * 4,
                             reinterpret_cast<std::byte*>(to + row * to_stride + square),
                             to_stride * 4);
          }
        }
      }
      for (std::int64_t row = first_row; row < last_row; ++row) {
        for (std::int64_t column = square; column < last; ++column)
          to[row * to_stride + column] = from[column * from_stride + row];
      }
    }
  }
}

}  // namespace flownpu::cpu
