// SPDX-License-Identifier: Apache-2.0
// Which values of a computation share a buffer: greedy by size, as Pisarchyk and Lee have it for
// shared objects (Efficient Memory Management for Deep Neural Net Inference, 2020), and ML Drift
// after them. The largest value chooses first. Each value takes the smallest buffer that is large
// enough and free during its life, else a new one.
#pragma once

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

namespace flownpu {

struct Lifetime {
  std::size_t bytes = 0;
  // First and last step, both included, of each time span in which the value is needed.
  std::vector<std::pair<int, int>> steps;
};

struct SharedBuffers {
  std::vector<std::size_t> buffer;  // each value's buffer
  std::vector<std::size_t> bytes;   // each buffer's size
};

SharedBuffers share_buffers(std::span<const Lifetime> values);

}  // namespace flownpu
