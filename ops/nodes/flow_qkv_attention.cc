// SPDX-License-Identifier: Apache-2.0
#include "ops/nodes/flow_qkv_attention.h"

#include <algorithm>

#include "ops/error.h"

namespace flownpu {

void check_block_numbers(std::span<const std::int32_t> numbers, std::string_view before,
                         std::int64_t row) {
  std::int32_t largest = 0;
  for (std::size_t token = 0; token < numbers.size(); ++token) {
    const bool goes_on = token > 0 && numbers[token] == numbers[token - 1];
    if (numbers[token] > 0 && numbers[token] <= largest && !goes_on) {
      fail(before, "expected the numbers in bidirectional_blocks to grow from block to block, got ",
           numbers[token], " after ", largest, " in row ", row);
    }
    largest = std::max(largest, numbers[token]);
  }
}

std::int64_t tokens_of_block(std::span<const std::int32_t> numbers) {
  if (numbers.front() <= 0) return 1;
  const auto end =
      std::ranges::find_if(numbers, [&](std::int32_t number) { return number != numbers.front(); });
  return end - numbers.begin();
}

}  // namespace flownpu
