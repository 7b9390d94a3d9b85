// SPDX-License-Identifier: Apache-2.0
// The CRC-32 of zip and zlib (ISO 3309), by which files of ours are told to be what was written:
// those of a folder of artifacts, and the head of a compiled partition.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace flownpu {

// For each byte, what it does to the remainder; the polynomial's bits in reverse.
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

// CRC-32 of bytes that follow others, whose sum is `before`.
inline std::uint32_t crc32(std::span<const std::byte> bytes, std::uint32_t before = 0) {
  std::uint32_t remainder = ~before;
  for (const std::byte byte : bytes) {
    remainder =
        (remainder >> 8) ^ kCrc32Table[(remainder ^ std::to_integer<std::uint32_t>(byte)) & 0xFF];
  }
  return ~remainder;
}

}  // namespace flownpu
