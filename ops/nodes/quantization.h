// SPDX-License-Identifier: Apache-2.0
// Linear quantisation in tensors, of QuantizeLinear and DequantizeLinear: codes of 4 or 8 bits, and
// which elements share a scale.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "ops/nodes/tensor.h"

namespace flownpu {

// The nibble at `index`; the low half of a byte comes first.
inline int nibble_at(const void* packed, std::int64_t index) {
  const auto byte = static_cast<const std::uint8_t*>(packed)[index / 2];
  return index % 2 == 0 ? byte & 15 : byte >> 4;
}

// An element of int4, uint4, int8, uint8 or int32.
inline int code_at(DataType type, const void* data, std::int64_t index) {
  switch (type) {
    case DataType::kInt4:
      return (nibble_at(data, index) ^ 8) - 8;  // the highest bit counts -8
    case DataType::kUInt4:
      return nibble_at(data, index);
    case DataType::kInt8:
      return static_cast<const std::int8_t*>(data)[index];
    case DataType::kUInt8:
      return static_cast<const std::uint8_t*>(data)[index];
    default:
      return static_cast<const std::int32_t*>(data)[index];
  }
}

// Where the scales of a tensor's elements are: one for all, one for each index of an axis, or one
// for each `block_size` neighbours along the axis, in a tensor of the rank of x.
class Scales {
 public:
  // `axis` may count from the end; `block_size` 0: no blocks. Returns nothing if such scales do not
  // fit the shape of x.
  static std::optional<Scales> of(const Shape& x, const Shape& scale, std::int64_t axis,
                                  std::int64_t block_size);

  // The index of the scale, and of the zero point, of an element of x.
  std::int64_t index(std::int64_t element) const {
    const std::int64_t along = element / inner_ % length_;
    if (!in_blocks_) return along;
    return (element / inner_ / length_ * blocks_ + along / block_size_) * inner_ + element % inner_;
  }
  // The number of elements from this one on that surely share its scale.
  std::int64_t shared(std::int64_t element) const {
    if (!in_blocks_) return inner_ - element % inner_;
    const std::int64_t along = element % length_;
    return inner_ > 1 ? 1 : std::min(block_size_ - along % block_size_, length_ - along);
  }

 private:
  std::int64_t inner_ = 1;   // elements of an index of the axis
  std::int64_t length_ = 1;  // of the axis; 1: one scale for all
  bool in_blocks_ = false;
  std::int64_t block_size_ = 1;
  std::int64_t blocks_ = 1;  // along the axis
};

}  // namespace flownpu
