// SPDX-License-Identifier: Apache-2.0
// Scale, minimum and codes of a group of Q4NX (equation 3: w = scale * code + minimum), searched
// for the least squared error, by alternating codes and a least-squares fit of scale and minimum.
// Codes are chosen for the rounded parameters, so that rounding to bf16 costs nothing twice.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "ops/formats/q4nx.h"

namespace flownpu::lowering {

// Scale and minimum are bits of bf16; codes are 0..15.
struct Q4NXGroup {
  std::uint16_t scale = 0;
  std::uint16_t minimum = 0;
  std::array<std::uint8_t, q4nx::kGroup> codes{};

  // What the i-th code stands for: scale * code + minimum.
  float weight(std::size_t i) const;
};

// `weights`: 1 to 32 finite ones, of at most 2^127.
Q4NXGroup quantize_group(std::span<const float> weights);

}  // namespace flownpu::lowering
