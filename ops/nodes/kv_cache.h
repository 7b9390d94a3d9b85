// SPDX-License-Identifier: Apache-2.0
// Rows of KV caches: a head's key or value of one token.
#pragma once

#include <cstdint>

#include "ops/nodes/tensor.h"

namespace flownpu {

// The most elements of a head for which kernels have buffers; the heads of known models have 64 to
// 256.
inline constexpr std::int64_t kMaxHeadSize = 512;

// A row of an int8 KV cache is a head's codes followed by their scale, an f32.
inline constexpr std::int64_t kInt8ScaleBytes = 4;
// Bytes of such a row in the array's memory, where padding follows the scale: rows begin where a
// vector can be loaded (aie/kernels/flow_kv_split.cc).
constexpr std::int64_t padded_int8_row(std::int64_t head_size) { return head_size + head_size / 4; }
// The number of elements in a row of a KV cache of that type.
std::int64_t cache_columns(DataType type, std::int64_t head_size);
// The size of such a row in bytes.
std::int64_t cache_row_bytes(DataType type, std::int64_t head_size);

}  // namespace flownpu
