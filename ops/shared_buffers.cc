// SPDX-License-Identifier: Apache-2.0
#include "ops/shared_buffers.h"

#include <algorithm>
#include <numeric>
#include <optional>

namespace flownpu {
namespace {

bool meet(const Lifetime& a, const Lifetime& b) {
  return std::ranges::any_of(a.steps, [&](const auto& mine) {
    return std::ranges::any_of(b.steps, [&](const auto& other) {
      return mine.first <= other.second && other.first <= mine.second;
    });
  });
}

}  // namespace

SharedBuffers share_buffers(std::span<const Lifetime> values) {
  std::vector<std::size_t> order(values.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, std::greater(),
                           [&](std::size_t value) { return values[value].bytes; });
  SharedBuffers shared{.buffer = std::vector<std::size_t>(values.size()), .bytes = {}};
  std::vector<std::vector<std::size_t>> users;
  for (const std::size_t value : order) {
    std::optional<std::size_t> best;
    for (std::size_t buffer = 0; buffer < users.size(); ++buffer) {
      const bool is_free = std::ranges::none_of(
          users[buffer], [&](std::size_t user) { return meet(values[user], values[value]); });
      // All buffers so far are large enough: larger values chose before.
      if (is_free && (!best || shared.bytes[buffer] < shared.bytes[*best])) best = buffer;
    }
    if (!best) {
      best = users.size();
      users.emplace_back();
      shared.bytes.push_back(values[value].bytes);
    }
    users[*best].push_back(value);
    shared.buffer[value] = *best;
  }
  return shared;
}

}  // namespace flownpu
