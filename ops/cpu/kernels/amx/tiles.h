// SPDX-License-Identifier: Apache-2.0
// AMX's tiles, as products use them: 16 rows of 64 bytes each.
//
// dots[m][n] += sum over k of x[m][k] * w[k / 4][n][k % 4]: m < 16 rows of activations, n < 16 rows
// of the weight, k < 64 columns of int8; of bf16 k < 32 and w[k / 2][n][k % 2]. Written in
// assembly, because GCC 12's intrinsics do not say that they read and write memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

constexpr std::int64_t kTileRows = 16;
constexpr std::int64_t kTileBytes = 64;

// Two tiles of activations, two of weights (even and odd rows), and the four of their dots.
enum Tile : int { kX0, kX1, kEven, kOdd, kEven0, kOdd0, kEven1, kOdd1 };

// Configures the processor's tiles as long as it lives: the first tiles of activations and of dots
// (0) have `rows0` rows, the second ones (1) `rows1`, at most 16 each. With rows1 = 0 only the
// first ones are used.
class Tiles {
 public:
  Tiles(std::int64_t rows0, std::int64_t rows1) {
    struct alignas(64) {
      std::uint8_t palette = 1;
      std::uint8_t start_row = 0;
      std::array<std::uint8_t, 14> reserved{};
      std::array<std::uint16_t, 16> row_bytes{};
      std::array<std::uint8_t, 16> rows{};
    } shapes;
    static_assert(sizeof(shapes) == 64);
    const auto set = [&](std::int64_t rows, auto... tiles) {
      ((shapes.row_bytes[tiles] = kTileBytes, shapes.rows[tiles] = static_cast<std::uint8_t>(rows)),
       ...);
    };
    set(kTileRows, kEven, kOdd);
    set(rows0, kX0, kEven0, kOdd0);
    if (rows1 > 0) set(rows1, kX1, kEven1, kOdd1);
    asm volatile("ldtilecfg %0" : : "m"(shapes));
  }
  ~Tiles() { asm volatile("tilerelease"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// Rows lie `stride` bytes apart.
template <Tile TILE>
inline void load_tile(const void* from, std::int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(TILE) : "memory");
}
template <Tile TILE>
inline void store_tile(void* to, std::int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(TILE) : "memory");
}
template <Tile TILE>
inline void clear_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(TILE));
}
// Dots of signed activations with signed, or with unsigned, weights.
template <Tile DOTS, Tile X, Tile WEIGHTS>
inline void dot_signed() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(DOTS), "i"(X), "i"(WEIGHTS));
}
template <Tile DOTS, Tile X, Tile WEIGHTS>
inline void dot_unsigned() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(DOTS), "i"(X), "i"(WEIGHTS));
}
// Dots of bf16 in f32, denormal numbers taken as zero.
template <Tile DOTS, Tile X, Tile WEIGHTS>
inline void dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(DOTS), "i"(X), "i"(WEIGHTS));
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
