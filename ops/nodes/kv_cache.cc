// SPDX-License-Identifier: Apache-2.0
#include "ops/nodes/kv_cache.h"

namespace flownpu {

std::int64_t cache_columns(DataType type, std::int64_t head_size) {
  return type == DataType::kInt8 ? head_size + kInt8ScaleBytes : head_size;
}

std::int64_t cache_row_bytes(DataType type, std::int64_t head_size) {
  return cache_columns(type, head_size) * static_cast<std::int64_t>(size_of(type));
}

}  // namespace flownpu
