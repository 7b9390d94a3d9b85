// SPDX-License-Identifier: Apache-2.0
// Where elements of a logical tensor are, as text: of coordinates that are text.
#pragma once

#include <string>
#include <vector>

#include "ops/gpu/language/kernel.h"

namespace flownpu::gpu {

// The element's number in a row-major tensor. The first size does not matter.
std::string index_of(const TensorDescription& tensor, const std::vector<std::string>& at);

// Offsets in bytes within a Q4NX weight: of what belongs to `row` and the second coordinate, which
// is a group for scale() and minimum(), and a column for codes(), those of the row's strip.
class WeightPlaces {
 public:
  WeightPlaces(const TensorDescription& weight, std::string row, std::string second);
  std::string scale() const;
  std::string minimum() const;
  std::string codes() const;
  // The same, within it that of the 8 rows from `row` on.
  std::string codes_of_8() const;

 private:
  // Offset of the group's block, and, `each` bytes a group, within it.
  std::string at_group(const std::string& group, std::int64_t each) const;

  q4nx::Layout layout_;
  std::int64_t row_bytes_;
  std::string row_;
  std::string second_;
};

}  // namespace flownpu::gpu
