// SPDX-License-Identifier: Apache-2.0
// Constants of the format of a compiled partition's file, which file.h describes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iomanip>
#include <span>
#include <sstream>
#include <string>

#include "ops/formats/crc32.h"

namespace flownpu::context_file {

inline constexpr std::uint64_t kMagic = 0x4355504E776F6C46;  // "FlowNPUC", little-endian
// Version 2 has a sum over the head, and no offsets of blobs; version 3 an identity;
// version 4 attributes of DecoderLayers by layer.
inline constexpr std::uint64_t kVersion = 4;
// The places of the version, the head's size and the identity, which the sum covers; and of the
// head, after the sum.
inline constexpr std::size_t kSummedBegin = sizeof(std::uint64_t);
inline constexpr std::size_t kSummedBytes = 3 * sizeof(std::uint64_t);
inline constexpr std::size_t kHeadBegin = 5 * sizeof(std::uint64_t);
inline constexpr std::size_t kAlignment = 4096;
inline constexpr std::int64_t kNoConstant = -1;

constexpr std::size_t aligned(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// `begin`: the version, the head's size and the identity as the file has them; `head`: its bytes.
inline std::uint64_t sum_of(std::span<const std::byte> begin, std::span<const std::byte> head) {
  return crc32(head, crc32(begin));
}

// The identity in the form of messages and EPContext nodes.
inline std::string to_text(std::uint64_t identity) {
  std::ostringstream text;
  text << std::hex << std::setw(16) << std::setfill('0') << identity;
  return text.str();
}

}  // namespace flownpu::context_file
