// SPDX-License-Identifier: Apache-2.0
#include "aie/emulator/walk.h"

#include <algorithm>

namespace flownpu::emulator {

Walk Walk::over(std::vector<Dimension> dimensions, std::size_t item) {
  Walk walk{{}, item};
  std::erase_if(dimensions, [](const Dimension& d) { return d.size == 1; });
  while (!dimensions.empty() && dimensions.back().stride == static_cast<std::int64_t>(walk.run)) {
    walk.run *= static_cast<std::size_t>(dimensions.back().size);
    dimensions.pop_back();
  }
  walk.dimensions = std::move(dimensions);
  return walk;
}

std::size_t Walk::bytes() const {
  std::size_t bytes = run;
  for (const Dimension& d : dimensions) bytes *= static_cast<std::size_t>(d.size);
  return bytes;
}

std::size_t Walk::end() const {
  std::size_t end = run;
  for (const Dimension& d : dimensions) end += static_cast<std::size_t>((d.size - 1) * d.stride);
  return end;
}

void Cursor::next_run() {
  done_ = 0;
  const auto& dimensions = walk_->dimensions;
  for (std::size_t i = dimensions.size(); i-- > 0;) {
    const Dimension& d = dimensions[i];
    if (++index_[i] < d.size) {
      at_ += d.stride;
      return;
    }
    at_ -= (d.size - 1) * d.stride;
    index_[i] = 0;
  }
}

void copy(Cursor& from, Cursor& to, std::size_t bytes) {
  while (bytes > 0) {
    const std::size_t piece = std::min({bytes, from.available(), to.available()});
    if (piece == 16) {  // a row of a sub-tile in bf16, by far the most frequent
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
