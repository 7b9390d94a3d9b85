// SPDX-License-Identifier: Apache-2.0
// A tensor as rows: its last axes, from one axis on, taken as one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "ops/cpu/integers.h"
#include "ops/nodes/tensor.h"

namespace flownpu::cpu {

// The product of the sizes of axes [first, last).
inline std::int64_t elements_of(const Shape& shape, std::int64_t first, std::int64_t last) {
  return Shape(shape.begin() + first, static_cast<std::size_t>(last - first)).elements();
}

struct Rows {
  // The first axis of a row.
  std::int64_t axis;
  // 0 if rows have no elements.
  std::int64_t count;
  std::int64_t size;

  // `first` counts from the end if it is negative. Throws Error naming the node if x has no such
  // axis.
  Rows(const std::string& name, const Shape& x, std::int64_t first)
      : axis(wrap(name, first, x.rank())), size(elements_of(x, axis, x.rank())) {
    count = size == 0 ? 0 : elements_of(x, 0, axis);
  }
};

}  // namespace flownpu::cpu
