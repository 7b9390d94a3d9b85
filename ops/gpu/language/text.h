// SPDX-License-Identifier: Apache-2.0
// Source is text of pieces.
#pragma once

#include <sstream>
#include <string>

namespace flownpu::gpu {

// The pieces, texts and numbers, one after the other.
template <typename... Pieces>
std::string text_of(const Pieces&... pieces) {
  std::ostringstream text;
  (text << ... << pieces);
  return text.str();
}

}  // namespace flownpu::gpu
