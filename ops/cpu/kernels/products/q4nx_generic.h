// SPDX-License-Identifier: Apache-2.0
// Q4NX one row of the weight at a time, in plain C++.
#pragma once

#include <cstring>

#include "ops/cpu/kernels/vector.h"
#include "ops/cpu/q4nx_rows.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

struct RowParameters {
  float scale;
  float minimum;
};

// Scale and minimum of a group, for row `row` < 32 of the first row of blocks.
inline RowParameters row_parameters(const Q4NXRows& weight, std::int64_t group, std::int64_t row) {
  const auto load = [&](const std::uint8_t* parameters) {
    std::uint16_t bits;
    std::memcpy(&bits, parameters + row * static_cast<std::int64_t>(sizeof(bits)), sizeof(bits));
    return float_from_bf16(bits);
  };
  const float scale = load(weight.scales(group));
  const std::uint8_t* minima = weight.minima(group);
  return {scale, minima == nullptr ? weight.layout.minimum_of_symmetric() * scale : load(minima)};
}

// The values of a group's codes of 4 bits.
inline const std::int8_t* code_values(const Q4NXRows& weight, std::int64_t group) {
  static constexpr std::int8_t kThemselves[] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                8, 9, 10, 11, 12, 13, 14, 15};
  if (!weight.layout.has_table) return kThemselves;
  return reinterpret_cast<const std::int8_t*>(weight.table(group));
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
