// SPDX-License-Identifier: Apache-2.0
#include "aie/emulator/walk.h"

#include <algorithm>

namespace flownpu::emulator {

Walk Walk::over(std::vector<Dimension> dimensions, std::size_t item) {
  Walk walk{{}, item};
  const auto plain = [](const Dimension& d) { return d.before == 0 && d.after == 0; };
  std::erase_if(dimensions, [&](const Dimension& d) { return d.size == 1 && plain(d); });
  while (!dimensions.empty() && plain(dimensions.back()) &&
         dimensions.back().stride == static_cast<std::int64_t>(walk.run)) {
    walk.run *= static_cast<std::size_t>(dimensions.back().size);
    dimensions.pop_back();
  }
  walk.dimensions = std::move(dimensions);
  return walk;
}

std::size_t Walk::bytes() const {
  std::size_t bytes = run;
  for (const Dimension& d : dimensions) {
    bytes *= static_cast<std::size_t>(d.before + d.size + d.after);
  }
  return bytes;
}

std::size_t Walk::end() const {
  std::size_t end = run;
  for (const Dimension& d : dimensions) end += static_cast<std::size_t>((d.size - 1) * d.stride);
  return end;
}

Cursor::Cursor(const Walk& walk, std::byte* base) : walk_(&walk), base_(base), at_(base) {
  for (std::size_t i = 0; i < walk.dimensions.size(); ++i) {
    const Dimension& d = walk.dimensions[i];
    index_[i] = -d.before;
    padded_ = padded_ || d.before != 0 || d.after != 0;
  }
  if (padded_) place();
}

void Cursor::next_run() {
  done_ = 0;
  const auto& dimensions = walk_->dimensions;
  for (std::size_t i = dimensions.size(); i-- > 0;) {
    const Dimension& d = dimensions[i];
    if (++index_[i] < d.size + d.after) {
      if (padded_) {
        place();
      } else {
        at_ += d.stride;
      }
      return;
    }
    if (!padded_) at_ -= (d.size - 1) * d.stride;
    index_[i] = -d.before;
  }
  if (padded_) place();
}

void Cursor::place() {
  at_ = base_;
  for (std::size_t i = 0; i < walk_->dimensions.size(); ++i) {
    const Dimension& d = walk_->dimensions[i];
    if (index_[i] < 0 || index_[i] >= d.size) {
      at_ = nullptr;
      return;
    }
    at_ += index_[i] * d.stride;
  }
}

void copy(Cursor& from, Cursor& to, std::size_t bytes) {
  while (bytes > 0) {
    const std::size_t piece = std::min({bytes, from.available(), to.available()});
    if (from.data() == nullptr) {
      std::memset(to.data(), 0, piece);
    } else if (piece == 16) {  // a row of a sub-tile in bf16, by far the most frequent
      std::memcpy(to.data(), from.data(), 16);
    } else {
      std::memcpy(to.data(), from.data(), piece);
    }
    from.advance(piece);
    to.advance(piece);
    bytes -= piece;
  }
}

}  // namespace flownpu::emulator
