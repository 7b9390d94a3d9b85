// SPDX-License-Identifier: Apache-2.0
// Where a key, or its value, lies in the KV cache, for FlowQKV (flow_qkv_attention.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/cpu/kernels.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// `rows`: sweep.key or sweep.value.
inline const std::byte* cache_row(const AttentionSweep& sweep, const void* rows, std::int64_t key) {
  const auto* bytes = static_cast<const std::byte*>(rows);
  if (sweep.blocks == nullptr) return bytes + key * sweep.row_bytes;
  const CacheBlocks& blocks = *sweep.blocks;
  // Positions have 32 bits: a 32-bit division takes half the time of a 64-bit one.
  const auto at = static_cast<std::uint32_t>(key);
  const auto each = static_cast<std::uint32_t>(blocks.rows);
  return bytes + blocks.table[at / each] * blocks.block_bytes + at % each * sweep.row_bytes;
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
