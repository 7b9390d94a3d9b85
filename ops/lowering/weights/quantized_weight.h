// SPDX-License-Identifier: Apache-2.0
// The 4-bit weights of `com.microsoft` operators, and Q4NX made of them.
//
// MatMulNBits and GatherBlockQuantized hold W[M,K] as codes of 4 bits (low nibble first along K), a
// scale for each `block_size` columns of a row, and a zero point, 8 where it is not given:
//
//   W[m, k] = scale[m, k / block_size] * (code[m, k] - zero_point[m, k / block_size])
//
// Q4NX says the same with a minimum. Codes stay as they are; the scale is rounded to bf16, and the
// minimum is -zero_point times that, rounded as well. Only where a block is 16 columns, two of
// which share Q4NX's scale, are the weights quantised again. Blocks of Q4NX are narrow, and
// symmetric ones where codes stay and no zero point is other than 8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "ops/formats/q4nx.h"
#include "ops/lowering/weights/quantize_group.h"
#include "ops/nodes/node.h"

namespace flownpu::lowering {

// The one block_size that weights are quantised again from: the least that ORT's kernels take.
inline constexpr std::int64_t kSmallBlock = 16;

// Sums of squares of weights W, and of their differences from the W' that replaced them.
struct Difference {
  double squares = 0;
  double squared_error = 0;

  // |W - W'| / |W| in the Frobenius norm; 0 if there is nothing.
  double relative() const;
  Difference& operator+=(const Difference& other);
};

// Puts a group of a row, the columns from k = first on, where it belongs in its row of blocks, of
// which all bytes are 0 before the first of its rows.
void put_group(const Q4NXGroup& group, std::int64_t row, std::int64_t first,
               const q4nx::Layout& layout, std::byte* row_of_blocks);

struct QuantizedWeight {
  Value codes;        // uint8, rows x blocks x block_size / 2
  Value scales;       // float32, rows x blocks
  Value zero_points;  // absent (no name), uint8 packed as codes to whole bytes a row, or as scales
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t block_size = 32;
  // Where the tensors have more rows: row r of the weight is theirs of number first + r * step.
  std::int64_t first_row = 0;
  std::int64_t row_step = 1;

  // Why it cannot become Q4NX; empty if it can.
  std::string obstacle() const;
  // What no weight is: numbers that are not finite, or too large for bf16. Of one without obstacle.
  std::string damage() const;
  bool keeps_codes() const;
  // Some of its rows, as a weight; `this` is one without obstacle, whose rows are all there are.
  QuantizedWeight some_rows(std::int64_t first, std::int64_t step, std::int64_t count) const;
  // The smallest that holds it.
  q4nx::Layout layout() const;
  // Writes `count` rows of blocks from the `first` on, to where the blocks of the whole weight
  // begin. `difference`: is added to; null: of codes that stay it is not asked.
  void pack(std::byte* blocks, const q4nx::Layout& layout, std::int64_t first, std::int64_t count,
            Difference* difference) const;

 private:
  std::int64_t blocks() const;
  // Where the tensors have a row.
  std::int64_t at(std::int64_t row) const { return first_row + row * row_step; }
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
