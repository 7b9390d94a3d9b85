// SPDX-License-Identifier: Apache-2.0
// A DMA's walk over memory: nested dimensions; and copying from one walk to another.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace flownpu::emulator {

// `size` steps of `stride` bytes.
struct Dimension {
  std::int64_t size;
  std::int64_t stride;
};

// The dimensions, outermost first, above runs of neighbouring bytes.
struct Walk {
  std::vector<Dimension> dimensions;
  std::size_t run;

  // Dimensions (strides in bytes) over elements of `item` bytes; contiguous ones become the run.
  static Walk over(std::vector<Dimension> dimensions, std::size_t item);

  // Bytes that are moved.
  [[nodiscard]] std::size_t bytes() const;
  // One past the highest byte that is touched.
  [[nodiscard]] std::size_t end() const;
};

// A place on a walk.
class Cursor {
 public:
  // Dimensions: a memory tile's four, and one for elements.
  static constexpr std::size_t kMost = 5;

  Cursor() = default;
  Cursor(const Walk& walk, std::byte* base) : walk_(&walk), at_(base) {}

  // Bytes that can be moved at once, and where they are in memory.
  [[nodiscard]] std::size_t available() const { return walk_->run - done_; }
  [[nodiscard]] std::byte* data() const { return at_ + done_; }

  void advance(std::size_t bytes) {
    done_ += bytes;
    if (done_ == walk_->run) next_run();
  }

 private:
  void next_run();

  const Walk* walk_ = nullptr;
  std::byte* at_ = nullptr;  // the run's beginning
  std::size_t done_ = 0;
  std::array<std::int64_t, kMost> index_{};
};

// Copies bytes from one walk to another, and advances both cursors.
void copy(Cursor& from, Cursor& to, std::size_t bytes);

}  // namespace flownpu::emulator
