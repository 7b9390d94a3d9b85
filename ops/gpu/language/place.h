// SPDX-License-Identifier: Apache-2.0
// The places of a logical tensor's elements in memory. Coordinates and places are expressions in
// text.
#pragma once

#include <string>
#include <vector>

#include "ops/gpu/language/kernel.h"

namespace flownpu::gpu {

// The element's index in a row-major tensor, in elements; in int8 rows the bytes of the scales
// count, too. The tensor's first size does not matter.
std::string index_of(const TensorDescription& tensor, const std::vector<std::string>& at);

// Offset in bytes of the scale of the row of int8 rows that has these coordinates: of its upper 16
// bits, which are a bf16; the lower ones are 0.
std::string scale_of_row(const TensorDescription& tensor, std::vector<std::string> row);

// Offsets in bytes within a Q4NX weight. The second coordinate is a group for scale() and
// minimum(), and a column for codes(), which is where the codes of the column in the row's strip of
// 16 rows begin, for byte_code(), of 8 bits, and for table().
class WeightPlaces {
 public:
  WeightPlaces(const TensorDescription& weight, std::string row, std::string second);
  std::string scale() const;
  std::string minimum() const;
  std::string codes() const;
  std::string byte_code() const;
  std::string table() const;

 private:
  // Offset of the group's block, plus the group's number within its block times `each` bytes.
  std::string at_group(const std::string& group, std::int64_t each) const;

  q4nx::Layout layout_;
  std::int64_t row_bytes_;
  std::string row_;
  std::string second_;
};

}  // namespace flownpu::gpu
