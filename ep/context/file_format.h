// SPDX-License-Identifier: Apache-2.0
// What writer and reader of the file of a compiled partition share; file.h describes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "ops/formats/crc32.h"

namespace flownpu::context_file {

inline constexpr std::uint64_t kMagic = 0x4355504E776F6C46;  // "FlowNPUC", little-endian
// 2: a sum over the head; blobs have no offsets.
inline constexpr std::uint64_t kVersion = 2;
// Magic, version, bytes of the head, sum.
inline constexpr std::size_t kHeadBegin = 4 * sizeof(std::uint64_t);
inline constexpr std::size_t kAlignment = 4096;
inline constexpr std::int64_t kNoConstant = -1;

constexpr std::size_t aligned(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// `sizes`: the bytes of version and of the head's size; `head`: those of the head.
inline std::uint64_t sum_of(std::span<const std::byte> sizes, std::span<const std::byte> head) {
  return crc32(head, crc32(sizes));
}

}  // namespace flownpu::context_file
