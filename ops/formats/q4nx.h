// SPDX-License-Identifier: Apache-2.0
// Q4NX (Gemma3 paper, section 3.1.1): the layout in memory of a weight W[M,K] of 4 or 8 bits.
//
// W is cut into blocks of 32 rows by 1 or 8 groups of 32 columns, stored row of blocks by row of
// blocks. w[row, k] = minimum + scale * code (eq. 3), with a code from 0 to 15 of 4 bits, or from
// -128 to 127 of 8. M is padded to 32 and K to whole blocks with zeros. A block of G groups of 4
// bits:
//     offset     0: 32 G bf16 scales, [k / 32][row]
//     offset  64 G: 32 G bf16 minima, likewise
//     offset 128 G: codes of rows 0-15, 32 G columns x 8 bytes
//     offset 384 G: codes of rows 16-31, likewise
// Byte j of a column holds row 2j of the 16 in its low nibble and row 2j+1 in its high nibble.
//
// Wide blocks, of the papers, of `.q4nx` files and of the NPU, have G = 8 and 5120 bytes. Narrow
// blocks, of converted models, have G = 1: they are read in one stream, and need no padding where K
// is a multiple of 32 but not of 256. Symmetric blocks are narrow blocks without minima (576 bytes
// instead of 640), for weights whose minima are all -8 times their scales, as in GGUF's Q4_0 or
// MatMulNBits without zero points.
//
// Blocks of 8 bits have one group: 32 scales, 32 minima or none (each is then 0), and 1024 codes
// in two's complement, [k / 4][even rows, odd rows][row / 2][k % 4]: 64 bytes have four columns of
// 16 rows, the operand of dot products of bytes and of a matrix unit's tile. The "minimum" is the
// weight whose code is 0, in the middle of the codes, because its rounding to bf16 is then at most
// 2^-8 of how far the middle of a group is from 0; at an end of 256 codes it would be up to half a
// step.
//
// Blocks of codes with a table are symmetric blocks with 16 bytes behind their codes, the table:
// int8 values. w = scale * table[code], as in MXFP4, NF4 and GGUF's IQ4_NL. They are weights of 8
// bits of which at most 16 values occur, and their minima are 0.
//
// The size of a block tells its layout, so that no reader takes one for another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "ops/nodes/tensor.h"

namespace flownpu::q4nx {

inline constexpr std::int64_t kBlockRows = 32;
inline constexpr std::int64_t kStripRows = 16;
// Columns that share a scale and a minimum.
inline constexpr std::int64_t kGroup = 32;
inline constexpr int kLargestCode = 15;
// The minimum of a symmetric weight of 4 bits in units of its scale: a code of 8 stands for 0.
inline constexpr float kMinimumOfSymmetric = -8;

// A column of a strip: 16 codes, two in each byte.
inline constexpr std::int64_t kColumnBytes = kStripRows / 2;
// Sizes in bytes of one group: the scales (or minima) of 32 rows; the codes of one strip.
inline constexpr std::int64_t kParameterBytes = kBlockRows * 2;
inline constexpr std::int64_t kGroupStripBytes = kGroup * kColumnBytes;
// Values of the codes from 0 to 15, int8.
inline constexpr std::int64_t kTableBytes = kLargestCode + 1;
// 8-bit codes of four columns of 32 rows.
inline constexpr std::int64_t kByteQuadBytes = kBlockRows * 4;

// a / b, rounded up, for any a of at least 0; written without a + b - 1, which might overflow.
constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return a / b + (a % b != 0 ? 1 : 0);
}
constexpr std::int64_t row_blocks(std::int64_t m) { return ceil_div(m, kBlockRows); }
constexpr std::int64_t groups_of(std::int64_t k) { return ceil_div(k, kGroup); }

// Offsets within a block, and within a row of blocks.
struct Layout {
  // log2(G): kernels ask for many groups, and a shift is cheaper than a division.
  int group_bits = 3;
  bool has_minima = true;
  // 4 or 8; strips and columns of bytes are those of 4.
  int code_bits = 4;
  // Whether codes of 4 bits are places in a table, in blocks of one group.
  bool has_table = false;

  // Whether the values of codes are int8, with 0 in their middle.
  constexpr bool is_signed() const { return code_bits == 8 || has_table; }
  // The minimum of a weight without minima, in units of its scale.
  constexpr float minimum_of_symmetric() const { return is_signed() ? 0 : kMinimumOfSymmetric; }

  constexpr std::int64_t groups_per_block() const { return std::int64_t{1} << group_bits; }
  constexpr std::int64_t block_columns() const { return kGroup << group_bits; }
  constexpr std::int64_t minimum_offset() const { return kParameterBytes << group_bits; }
  constexpr std::int64_t code_offset() const {
    return (has_minima ? 2 : 1) * kParameterBytes << group_bits;
  }
  constexpr std::int64_t strip_bytes() const { return kGroupStripBytes << group_bits; }
  constexpr std::int64_t block_bytes() const {
    return code_offset() + (kBlockRows * kGroup * code_bits / 8 << group_bits) +
           (has_table ? kTableBytes : 0);
  }
  // The byte of an 8-bit code among those of its group.
  static constexpr std::int64_t byte_code_at(std::int64_t row, std::int64_t column) {
    return column / 4 * kByteQuadBytes + row % 2 * (kByteQuadBytes / 2) + row / 2 * 4 + column % 4;
  }
  constexpr std::int64_t column_blocks(std::int64_t k) const {
    return ceil_div(k, block_columns());
  }
  // The number of groups in a row of blocks, padding included, and the size of the row in bytes.
  constexpr std::int64_t stored_groups(std::int64_t k) const {
    return column_blocks(k) << group_bits;
  }
  constexpr std::int64_t row_bytes(std::int64_t k) const {
    return column_blocks(k) * block_bytes();
  }

  // Offsets within a row of blocks: of a group's scales, and of its codes in rows 0-15. Its minima
  // are minimum_offset() after the scales, its codes in rows 16-31 strip_bytes() after those.
  constexpr std::int64_t scales_at(std::int64_t group) const {
    return block_at(group) + within(group) * kParameterBytes;
  }
  constexpr std::int64_t codes_at(std::int64_t group) const {
    return block_at(group) + code_offset() + within(group) * kGroupStripBytes;
  }

  constexpr std::int64_t table_at(std::int64_t group) const {
    return block_at(group) + block_bytes() - kTableBytes;
  }

  bool operator==(const Layout&) const = default;

 private:
  constexpr std::int64_t block_at(std::int64_t group) const {
    return (group >> group_bits) * block_bytes();
  }
  constexpr std::int64_t within(std::int64_t group) const {
    return group & (groups_per_block() - 1);
  }
};

inline constexpr Layout kWide{3, true};
inline constexpr Layout kNarrow{0, true};
inline constexpr Layout kSymmetric{0, false};
inline constexpr Layout kEightBits{0, false, 8};
inline constexpr Layout kEightBitsWithMinima{0, true, 8};
inline constexpr Layout kTable{0, false, 4, true};
static_assert(kWide.block_bytes() == 5120, "32 x 256 weights at 5 bits");
static_assert(kNarrow.block_bytes() == 640, "32 x 32 weights at 5 bits");
static_assert(kSymmetric.block_bytes() == 576, "32 x 32 weights at 4.5 bits");
static_assert(kEightBits.block_bytes() == 1088, "32 x 32 weights at 8.5 bits");
static_assert(kEightBitsWithMinima.block_bytes() == 1152, "32 x 32 weights at 9 bits");
static_assert(kTable.block_bytes() == 592, "32 x 32 weights at 4.5 bits, and a table");
// All layouts; no two have blocks of one size.
inline constexpr Layout kLayouts[] = {kWide, kNarrow, kSymmetric, kEightBits, kEightBitsWithMinima,
                                      kTable};

// The shape of the uint8 tensor that holds W[m,k].
inline Shape blocks_shape(std::int64_t m, std::int64_t k, const Layout& layout) {
  return Shape{row_blocks(m), layout.column_blocks(k), layout.block_bytes()};
}

// The layout of a uint8 tensor [row of blocks, block, byte], told by its last dimension; nullopt if
// no layout has blocks of that size.
inline std::optional<Layout> layout_of(const Shape& weight) {
  if (weight.rank() != 3) return std::nullopt;
  for (const Layout& layout : kLayouts) {
    if (weight[2] == layout.block_bytes()) return layout;
  }
  return std::nullopt;
}

}  // namespace flownpu::q4nx
