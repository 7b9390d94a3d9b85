// SPDX-License-Identifier: Apache-2.0
// Puts source text together from pieces.
#pragma once

#include <sstream>
#include <string>

namespace flownpu::gpu {

// The pieces, strings and numbers, one after the other.
template <typename... Pieces>
std::string text_of(const Pieces&... pieces) {
  std::ostringstream text;
  (text << ... << pieces);
  return text.str();
}

}  // namespace flownpu::gpu
