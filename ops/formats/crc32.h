// SPDX-License-Identifier: Apache-2.0
// The CRC-32 of zip and zlib (ISO 3309), which detects damage in the files of an artifacts folder
// and in the head of a compiled partition's file.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace flownpu {

// The remainder that each byte value contributes; for the polynomial with its bits reversed.
inline constexpr std::array<std::uint32_t, 256> kCrc32Table = [] {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < table.size(); ++byte) {
    std::uint32_t remainder = byte;
    for (int bit = 0; bit < 8; ++bit)
      remainder = (remainder >> 1) ^ ((remainder & 1) != 0 ? 0xEDB88320U : 0U);
    table[byte] = remainder;
  }
  return table;
}();

// CRC-32 of `bytes`, or, with `before`, of a longer sequence that ends in `bytes` and whose
// preceding part has the CRC-32 `before`.
inline std::uint32_t crc32(std::span<const std::byte> bytes, std::uint32_t before = 0) {
  std::uint32_t remainder = ~before;
  for (const std::byte byte : bytes) {
    remainder =
        (remainder >> 8) ^ kCrc32Table[(remainder ^ std::to_integer<std::uint32_t>(byte)) & 0xFF];
  }
  return ~remainder;
}

}  // namespace flownpu
