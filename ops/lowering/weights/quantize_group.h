// SPDX-License-Identifier: Apache-2.0
// Searches for the scale, minimum and codes of a Q4NX group (equation 3: w = scale * code +
// minimum) with the least squared error. It alternates between choosing codes and fitting scale and
// minimum to them by least squares. Codes are chosen for the rounded parameters, so that they
// compensate for the rounding to bf16.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "ops/formats/q4nx.h"

namespace flownpu::lowering {

// Scale and minimum are bits of bf16; codes are 0..15 of 4 bits, or -128..127 of 8.
struct Q4NXGroup {
  std::uint16_t scale = 0;
  std::uint16_t minimum = 0;
  std::array<std::int8_t, q4nx::kGroup> codes{};

  // The weight that the i-th code stands for: scale * code + minimum.
  float weight(std::size_t i) const;
};

// The most groups that are searched side by side, on any processor.
inline constexpr std::size_t kGroupsAtOnce = 16;

// How many groups this processor can search side by side, the fewest first: 4, with AVX2 also 8,
// with AVX-512 also 16. All widths find the same bits.
std::vector<std::size_t> search_widths();

// Quantises found.size() groups. `weights`: `size` (1 to 32) for each group, one group after the
// other; finite, with magnitudes of at most 2^127. `width`: one of search_widths(); 0: the fastest
// for that many groups.
void quantize_groups(std::span<const float> weights, std::size_t size, std::span<Q4NXGroup> found,
                     std::size_t width = 0);

// Quantises one group of up to 32 weights, which takes as long as four groups at once.
Q4NXGroup quantize_group(std::span<const float> weights);

}  // namespace flownpu::lowering
