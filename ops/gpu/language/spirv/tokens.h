// SPDX-License-Identifier: Apache-2.0
// The text of a kernel as words, numbers and signs.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace flownpu::gpu::spirv {

struct Token {
  enum class Kind : std::uint8_t { kName, kInteger, kUnsigned, kFloat, kSign, kEnd };
  Kind kind = Kind::kEnd;
  std::string text = {};
  std::int64_t integer = 0;
  float number = 0;
};

// Ends with a token of the kind kEnd. Comments begin with `//`. Throws Error for a character that
// the language does not have.
std::vector<Token> tokens_of(std::string_view text);

}  // namespace flownpu::gpu::spirv
