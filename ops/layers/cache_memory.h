// SPDX-License-Identifier: Apache-2.0
// CacheMemory: where a device keeps the keys and values of one sequence.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/nodes/tensor.h"

namespace flownpu::layers {

// Rows of a KV cache, `count` positions from `first` on of one KV head, of which each has as many
// elements as the head, and of int8 a scale. `part`: 2 x layer, + 1 for values.
struct CacheRows {
  std::size_t part = 0;
  std::int64_t head = 0;
  std::int64_t first = 0;
  std::int64_t count = 0;
};

// Rows are moved from and to tensors of the graph, where they lie one behind the other, as float,
// float16, bfloat16 or, where the device has such caches (DecoderLimits), int8. All throw
// DeviceFailed.
class CacheMemory {
 public:
  virtual ~CacheMemory() = default;

  // Makes room for so many positions, and keeps what there is. Throws Unsupported, with nothing
  // changed, if there is none.
  virtual void reserve(std::int64_t positions) = 0;
  // write() for all parts and heads of some positions, then written() once.
  virtual void write(const CacheRows& rows, const std::byte* from, DataType type) = 0;
  virtual void written(std::int64_t first, std::int64_t count) = 0;
  // fetch() once for the positions of a part from 0 on, then read().
  virtual void fetch(std::size_t part, std::int64_t count) = 0;
  virtual void read(const CacheRows& rows, std::byte* to, DataType type) = 0;
  // Positions from 0 on out of another cache of the same device.
  virtual void copy(CacheMemory& from, std::int64_t count) = 0;
};

}  // namespace flownpu::layers
