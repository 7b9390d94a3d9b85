// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/broadcast.h"

#include "ops/error.h"

namespace flownpu::cpu {

std::optional<Shape> try_broadcast(const Shape& a, const Shape& b) {
  const int rank = std::max(a.rank(), b.rank());
  Shape result;
  for (int axis = -rank; axis < 0; ++axis) {
    const std::int64_t x = -axis <= a.rank() ? a[axis] : 1;
    const std::int64_t y = -axis <= b.rank() ? b[axis] : 1;
    if (x != y && x != 1 && y != 1) return std::nullopt;
    result.append(x == 1 ? y : x);
  }
  return result;
}

Shape broadcast_shapes(const std::string& name, const Shape& a, const Shape& b) {
  const std::optional<Shape> shape = try_broadcast(a, b);
  if (!shape)
    fail("[", name, "] expected shapes that broadcast, got ", to_string(a), " and ", to_string(b));
  return *shape;
}

}  // namespace flownpu::cpu
