// SPDX-License-Identifier: Apache-2.0
// The 4-bit weights of `com.microsoft` operators, and their conversion to Q4NX.
//
// MatMulNBits and GatherBlockQuantized hold W[M,K] as codes of 4 bits (low nibble first along K), a
// scale for each `block_size` columns of a row, and a zero point, 8 where it is not given:
//
//   W[m, k] = scale[m, k / block_size] * (code[m, k] - zero_point[m, k / block_size])
//
// Q4NX has a minimum instead of the zero point. Codes stay as they are; the scale is rounded to
// bf16, and the minimum is -zero_point times the rounded scale, rounded as well. Weights are
// quantised again only if block_size is 16, because then two blocks share one scale of Q4NX. The
// Q4NX blocks are symmetric where codes stay and every zero point is 8, else narrow.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "ops/formats/q4nx.h"
#include "ops/lowering/weights/quantize_group.h"
#include "ops/nodes/node.h"

namespace flownpu::lowering {

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
  Value codes;        // uint8, rows x blocks x block_size / 2
  Value scales;       // float32, rows x blocks
  Value zero_points;  // absent (no name); uint8 like codes, a row in whole bytes; or like scales
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t block_size = 32;
  // The weight may be some of the tensors' rows: its row r is their row first_row + r * row_step.
  std::int64_t first_row = 0;
  std::int64_t row_step = 1;

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
  // The tensors' row that is `row` of the weight.
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
