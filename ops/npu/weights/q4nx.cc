// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/weights/q4nx.h"

#include <algorithm>
#include <cstring>

#include "ops/formats/numbers.h"
#include "ops/formats/q4nx_layouts.h"

namespace flownpu::npu {

std::size_t wide_row_bytes(const layers::Q4NXWeight& weight) {
  return static_cast<std::size_t>(q4nx::kWide.row_bytes(weight.columns));
}

float value_at(const layers::Q4NXWeight& weight, std::int64_t m, std::int64_t k) {
  const q4nx::Layout& layout = weight.layout;
  const std::byte* blocks = weight.blocks + m / q4nx::kBlockRows * layout.row_bytes(weight.columns);
  const std::int64_t row = m % q4nx::kBlockRows;
  const std::int64_t group = k / q4nx::kGroup;
  const auto parameter = [&](std::int64_t offset) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, blocks + layout.scales_at(group) + offset + row * 2, 2);
    return from_bfloat16(bits);
  };
  const std::int64_t place = row / q4nx::kStripRows * layout.strip_bytes() +
                             k % q4nx::kGroup * q4nx::kColumnBytes + row % q4nx::kStripRows / 2;
  const auto pair = std::to_integer<unsigned>(blocks[layout.codes_at(group) + place]);
  const unsigned code = row % 2 == 0 ? pair & 15U : pair >> 4U;
  const float scale = parameter(0);
  const float minimum =
      layout.has_minima ? parameter(layout.minimum_offset()) : q4nx::kMinimumOfSymmetric * scale;
  return minimum + scale * static_cast<float>(code);
}

void write_wide_row(const layers::Q4NXWeight& weight, std::int64_t number,
                    std::span<std::byte> wide) {
  const q4nx::Layout& layout = weight.layout;
  const std::byte* row = weight.blocks + number * layout.row_bytes(weight.columns);
  if (layout == q4nx::kWide) {
    std::memcpy(wide.data(), row, wide.size());
    return;
  }
  const std::int64_t first = number % q4nx::row_blocks(weight.rows) * q4nx::kBlockRows;
  const std::int64_t rows = std::min(q4nx::kBlockRows, weight.rows - first);
  q4nx::convert_row(row, layout, wide.data(), q4nx::kWide, weight.columns, rows);
}

}  // namespace flownpu::npu
