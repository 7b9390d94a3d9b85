// SPDX-License-Identifier: Apache-2.0
#include "ops/nodes/quantization.h"

namespace flownpu {

std::optional<Scales> Scales::of(const Shape& x, const Shape& scale, std::int64_t axis,
                                 std::int64_t block_size) {
  Scales scales;
  if (block_size == 0 && scale.elements() == 1) {
    scales.inner_ = std::max<std::int64_t>(x.elements(), 1);
    return scales;
  }
  if (axis < -x.rank() || axis >= x.rank()) return std::nullopt;
  const int at = static_cast<int>(axis < 0 ? axis + x.rank() : axis);
  scales.length_ = std::max<std::int64_t>(x[at], 1);
  for (int i = at + 1; i < x.rank(); ++i) scales.inner_ *= std::max<std::int64_t>(x[i], 1);
  if (block_size == 0)
    return scale.rank() == 1 && scale[0] == x[at] ? std::optional(scales) : std::nullopt;
  Shape expected = x;
  expected[at] = (x[at] + block_size - 1) / block_size;
  scales.in_blocks_ = true;
  scales.block_size_ = block_size;
  scales.blocks_ = expected[at];
  return scale == expected ? std::optional(scales) : std::nullopt;
}

}  // namespace flownpu
