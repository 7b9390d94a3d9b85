// SPDX-License-Identifier: Apache-2.0
#include "ops/formats/utf8.h"

#include <cstddef>
#include <cstdint>

namespace flownpu {
namespace {

// The number of bytes of the text's first character; 0 if the text does not begin with a valid one.
std::size_t character_bytes(std::string_view text) {
  // The smallest code points that need two, three and four bytes: an encoding of a smaller one is
  // longer than necessary, hence invalid.
  constexpr std::uint32_t kLeast[] = {0x80, 0x800, 0x10000};
  const std::uint32_t first = static_cast<unsigned char>(text[0]);
  if (first < 0x80) return 1;
  if (first < 0xc0 || first > 0xf4) return 0;
  const std::size_t following = first < 0xe0 ? 1 : first < 0xf0 ? 2 : 3;
  if (text.size() - 1 < following) return 0;
  std::uint32_t code = first & (0x3fU >> following);
  for (std::size_t i = 1; i <= following; ++i) {
    const std::uint32_t byte = static_cast<unsigned char>(text[i]);
    if ((byte & 0xc0) != 0x80) return 0;
    code = code << 6 | (byte & 0x3f);
  }
  const bool surrogate = code >= 0xd800 && code <= 0xdfff;
  if (code < kLeast[following - 1] || code > 0x10ffff || surrogate) return 0;
  return 1 + following;
}

}  // namespace

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const std::size_t bytes = character_bytes(text);
    if (bytes == 0) return false;
    text.remove_prefix(bytes);
  }
  return true;
}

std::string as_utf8(std::string_view text) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string valid;
  valid.reserve(text.size());
  while (!text.empty()) {
    const std::size_t bytes = character_bytes(text);
    if (bytes == 0) {
      const auto byte = static_cast<unsigned char>(text[0]);
      valid.append("\\x").append({kDigits[byte >> 4U], kDigits[byte & 0xfU]});
    } else {
      valid.append(text.substr(0, bytes));
    }
    text.remove_prefix(bytes == 0 ? 1 : bytes);
  }
  return valid;
}

}  // namespace flownpu
