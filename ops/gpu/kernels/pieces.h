// SPDX-License-Identifier: Apache-2.0
// Pieces of kernels' texts.
#pragma once

#include <string>

namespace flownpu::gpu {

// `text` with `word` replaced everywhere.
inline std::string replaced(std::string text, const std::string& word, const std::string& by) {
  for (std::size_t at = text.find(word); at != std::string::npos;
       at = text.find(word, at + by.size()))
    text.replace(at, word.size(), by);
  return text;
}

// Sets `sum` to its sum over all lanes, in two stages: 16 lanes add every 16th each, then every
// lane adds these 16. A tree would have eight barriers.
inline constexpr const char* kSumOverLanes = R"(
  sums[lane()] = sum;
  synchronise();
  sum = 0.0f;
  if (lane() < 16) {
    for (int other = lane(); other < args.lanes; other += 16) sum += sums[other];
    sixteenths[lane()] = sum;
  }
  synchronise();
  sum = 0.0f;
  for (int one = 0; one < 16; ++one) sum += sixteenths[one];
)";

// Lanes of a work-group that has a row of so many columns. With 256, the most that every GPU takes,
// each has few columns of a long row.
inline std::int64_t lanes_of_row(std::int64_t columns) { return columns < 256 ? 64 : 256; }

}  // namespace flownpu::gpu
