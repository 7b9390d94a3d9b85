// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/weights/q4nx.h"

#include <algorithm>
#include <cstring>

#include "ops/formats/numbers.h"
#include "ops/formats/q4nx.h"

namespace flownpu::npu {
namespace {

std::uint16_t minimum_of_symmetric(std::uint16_t scale) {
  return to_bfloat16(q4nx::kMinimumOfSymmetric * from_bfloat16(scale));
}

// Writes the minima of the 32 rows of a group. Rows beyond `rows` are padding, whose minimum is 0,
// as their scale is (-8 times which would be -0).
void write_minima(const std::byte* scales, const q4nx::Layout& layout, std::int64_t rows,
                  std::byte* minima) {
  if (layout.has_minima) {
    std::memcpy(minima, scales + layout.minimum_offset(), q4nx::kParameterBytes);
    return;
  }
  for (std::int64_t row = 0; row < rows; ++row) {
    std::uint16_t scale = 0;
    std::memcpy(&scale, scales + row * 2, 2);
    const std::uint16_t minimum = minimum_of_symmetric(scale);
    std::memcpy(minima + row * 2, &minimum, 2);
  }
}

}  // namespace

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
  std::memset(wide.data(), 0, wide.size());
  for (std::int64_t group = 0; group < q4nx::groups_of(weight.columns); ++group) {
    const std::byte* scales = row + layout.scales_at(group);
    std::byte* wide_scales = wide.data() + q4nx::kWide.scales_at(group);
    std::memcpy(wide_scales, scales, q4nx::kParameterBytes);
    write_minima(scales, layout, rows, wide_scales + q4nx::kWide.minimum_offset());
    const std::byte* codes = row + layout.codes_at(group);
    std::byte* wide_codes = wide.data() + q4nx::kWide.codes_at(group);
    std::memcpy(wide_codes, codes, q4nx::kGroupStripBytes);
    std::memcpy(wide_codes + q4nx::kWide.strip_bytes(), codes + layout.strip_bytes(),
                q4nx::kGroupStripBytes);
  }
}

}  // namespace flownpu::npu
