// SPDX-License-Identifier: Apache-2.0
// Where elements of a logical tensor are, as text: of coordinates that are text.
#pragma once

#include <string>
#include <vector>

#include "ops/gpu/language/kernel.h"

namespace flownpu::gpu {

// The element's number in a row-major tensor, of int8 rows with their scales' bytes. The first size
// does not matter.
std::string index_of(const TensorDescription& tensor, const std::vector<std::string>& at);

// Offset in bytes of the scale of a row of int8 rows, of which these are the coordinates: of its
// upper 16 bits, which are a bf16; the lower ones are 0.
std::string scale_of_row(const TensorDescription& tensor, std::vector<std::string> row);

// Offsets in bytes within a Q4NX weight: of what belongs to `row` and the second coordinate, which
// is a group for scale() and minimum(), and a column for codes(), those of the row's strip.
class WeightPlaces {
 public:
  WeightPlaces(const TensorDescription& weight, std::string row, std::string second);
  std::string scale() const;
  std::string minimum() const;
  std::string codes() const;

 private:
  // Offset of the group's block, and, `each` bytes a group, within it.
  std::string at_group(const std::string& group, std::int64_t each) const;

  q4nx::Layout layout_;
  std::int64_t row_bytes_;
  std::string row_;
  std::string second_;
};

}  // namespace flownpu::gpu
