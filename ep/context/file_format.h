// SPDX-License-Identifier: Apache-2.0
// Constants of the format of a compiled partition's file, which file.h describes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "ops/formats/crc32.h"

namespace flownpu::context_file {

inline constexpr std::uint64_t kMagic = 0x4355504E776F6C46;  // "FlowNPUC", little-endian
// Version 2 has a sum over the head, and no offsets of blobs.
inline constexpr std::uint64_t kVersion = 2;
// Where the head begins: after the magic, the version, the head's size and the sum.
inline constexpr std::size_t kHeadBegin = 4 * sizeof(std::uint64_t);
inline constexpr std::size_t kAlignment = 4096;
inline constexpr std::int64_t kNoConstant = -1;

constexpr std::size_t aligned(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// `sizes`: the bytes in the file of the version and the head's size; `head`: the bytes of the head.
inline std::uint64_t sum_of(std::span<const std::byte> sizes, std::span<const std::byte> head) {
  return crc32(head, crc32(sizes));
}

}  // namespace flownpu::context_file
