// SPDX-License-Identifier: Apache-2.0
// Constant weights of 4 or 8 bits, and their conversion to Q4NX.
//
// MatMulNBits, GatherBlockQuantized and DequantizeLinear hold W[M,K] as codes, a scale for each
// `block_size` columns of a row, and a zero point:
//
//   W[m, k] = scale[m, k / block_size] * (code[m, k] - zero_point[m, k / block_size])
//
// Codes and zero points of 4 bits are nibbles, the low one of a byte first along K; absent, a zero
// point is 8. Those of 8 bits are bytes; absent, a zero point is 128. Those of ONNX's types (int4,
// uint4, and int8 and uint8 of DequantizeLinear) follow each other without padding, and an absent
// zero point is 0; here codes and zero points of int4 count 8 more, and those of int8 128 more, so
// that codes are 0 to 15 and 0 to 255.
//
// Q4NX has a minimum instead of the zero point. Codes stay as they are (bytes less 128, so that
// they are signed); the scale is rounded to bf16, and the minimum, which is that of the code 0, is
// a multiple of the rounded scale, rounded as well. Weights are quantised again only if block_size
// is 16, because then two blocks share one scale of Q4NX (with a table they are refused). The Q4NX
// blocks have no minima where codes stay and every zero point is 8 or 128.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "ops/formats/q4nx.h"
#include "ops/lowering/weights/quantize_group.h"
#include "ops/nodes/node.h"

namespace flownpu::lowering {

// MatMulBnb4 and QMoE's MXFP4 hold codes that are places in a table of values:
//
//   W[m, k] = scale[m, k / block_size] * table[code[m, k]]
//
// MatMulBnb4's first code of a byte is in its high nibble. Q4NX's table has the nearest multiples
// of 1 / steps, and the scale is divided by `steps`.
struct ValueTable {
  std::array<float, q4nx::kTableBytes> values{};
  float steps = 0;
};

// The only block_size for which weights are quantised again: the smallest that ORT's kernels take.
inline constexpr std::int64_t kSmallBlock = 16;

// Sums of squares of weights W, and of their differences from the W' that replaced them.
struct Difference {
  double squares = 0;
  double squared_error = 0;

  // |W - W'| / |W| in the Frobenius norm; 0 if all weights are 0 or there are none.
  double relative() const;
  Difference& operator+=(const Difference& other);
};

// Writes a group, the columns from `first` on of row `row`, to its place in the row of blocks. The
// row of blocks must be zero before its first row is written.
void put_group(const Q4NXGroup& group, std::int64_t row, std::int64_t first,
               const q4nx::Layout& layout, std::byte* row_of_blocks);

struct QuantizedWeight {
  // uint8, rows x blocks x block_size * bits / 8; or of ONNX's types, rows x columns.
  Value codes;
  // float32, rows x blocks, beside codes of ONNX's types also one for all; or float8e8m0.
  Value scales;
  // Absent (no name); uint8, a row in whole bytes, of `bits` each; or float32, or the codes' type
  // of ONNX's, like scales.
  Value zero_points;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t block_size = 32;
  std::int64_t bits = 4;
  bool of_onnx_types = false;
  // Whether codes of ONNX's types are [columns, rows], and so scales of float32 and zero points
  // [blocks, rows].
  bool transposed = false;
  // Absent, or float32: a factor for the scales of each of equally many rows (an expert).
  // Transposed codes are then those of one expert after the other.
  Value factors{};
  // The weight may be some of the tensors' rows: its row r is their row first_row + r * row_step.
  std::int64_t first_row = 0;
  std::int64_t row_step = 1;
  const ValueTable* table = nullptr;  // if codes are places in it; lives as long as the program

  // Why the weight cannot become Q4NX; empty if it can.
  std::string obstacle() const;
  // A message if scales or weights are not finite, or too large for bf16; else empty. To be called
  // only if obstacle() is empty.
  std::string damage() const;
  bool keeps_codes() const;
  // Every `step`-th row from `first` on, `count` in all, as a separate weight. Only for a weight
  // without obstacle that has all rows of its tensors.
  QuantizedWeight some_rows(std::int64_t first, std::int64_t step, std::int64_t count) const;
  // The smallest Q4NX layout that holds the weight.
  q4nx::Layout layout() const;
  // Writes `count` rows of blocks, from row of blocks `first` on. `blocks`: where the blocks of the
  // whole weight begin. Adds the error to `difference`, unless it is null.
  void pack(std::byte* blocks, const q4nx::Layout& layout, std::int64_t first, std::int64_t count,
            Difference* difference) const;

 private:
  std::int64_t blocks() const;
  // The zero point of weights without any, 2^(bits - 1); also what makes 8-bit codes signed.
  int symmetric_point() const { return 1 << (bits - 1); }
  bool has_symmetric_points() const;
  // The stored code that becomes the code 0, whose weight is the minimum.
  int code_of_minimum() const { return bits == 8 ? symmetric_point() : 0; }
  // Element `index` of codes or zero points, from 0 to 2^bits - 1.
  int element(const Value& value, std::int64_t index) const;
  // The tensors' row that is `row` of the weight.
  std::int64_t at(std::int64_t row) const { return first_row + row * row_step; }
  // The number of rows that share a factor.
  std::int64_t rows_of_factor() const;
  std::int64_t scale_index(std::int64_t row, std::int64_t block) const;
  float scale(std::int64_t row, std::int64_t block) const;
  // The int8 value of a code in Q4NX's table.
  std::int8_t table_value(std::size_t code) const;
  int code(std::int64_t row, std::int64_t column) const;
  float zero_point(std::int64_t row, std::int64_t block) const;
  Q4NXGroup group(std::int64_t row, std::int64_t first) const;
  Q4NXGroup new_group(std::int64_t row, std::int64_t first) const;
  void measure(const Q4NXGroup& made, std::int64_t row, std::int64_t first,
               Difference& difference) const;
  float weight(std::int64_t row, std::int64_t column) const;
  void pack_row(std::int64_t row, std::byte* row_of_blocks, const q4nx::Layout& layout,
                Difference* difference) const;
};

}  // namespace flownpu::lowering
