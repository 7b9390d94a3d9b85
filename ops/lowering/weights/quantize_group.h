// SPDX-License-Identifier: Apache-2.0
// Scale, minimum and codes of a group of Q4NX (equation 3: w = scale * code + minimum), searched
// for the least squared error, by alternating codes and a least-squares fit of scale and minimum.
// Codes are chosen for the rounded parameters, so that rounding to bf16 costs nothing twice.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

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

// The most groups that are searched side by side, on any processor.
inline constexpr std::size_t kGroupsAtOnce = 16;

// The widths in which this processor searches, the narrowest first: 4, with AVX2 also 8, with
// AVX-512 also 16 groups side by side. All find the same bits.
std::vector<std::size_t> search_widths();

// `weights`: groups of `size` each (1 to 32), one after the other, as many as `found` has room for;
// finite, and of at most 2^127. `width`: one of search_widths(); 0: the best of them for so many.
void quantize_groups(std::span<const float> weights, std::size_t size, std::span<Q4NXGroup> found,
                     std::size_t width = 0);

// One group, which takes as long as four.
Q4NXGroup quantize_group(std::span<const float> weights);

}  // namespace flownpu::lowering
