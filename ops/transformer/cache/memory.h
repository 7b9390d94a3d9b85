// SPDX-License-Identifier: Apache-2.0
// CacheMemory: the memory in which a device keeps the keys and values of one sequence.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>

#include "ops/nodes/tensor.h"

namespace flownpu::transformer {

// `count` rows of a KV cache: the positions from `first` on of one KV head. A row has as many
// elements as the head; in int8 its scale follows. `part`: 2 x layer for keys, 2 x layer + 1 for
// values.
struct CacheRows {
  std::size_t part = 0;
  std::int64_t head = 0;
  std::int64_t first = 0;
  std::int64_t count = 0;
};

// Rows are copied from and to tensors of the graph, in which the rows of a CacheRows are
// contiguous: float, float16, bfloat16 or, if the device supports it (DecoderLimits), int8. All
// functions throw DeviceFailed.
class CacheMemory {
 public:
  virtual ~CacheMemory() = default;

  // Makes room for that many positions, and keeps the contents. Throws Unsupported, with nothing
  // changed, if there is not enough memory.
  virtual void reserve(std::int64_t positions) = 0;
  // Usage: write() for all heads of some positions of both parts of a layer (its number among those
  // with attention), then written() once for these.
  virtual void write(const CacheRows& rows, const std::byte* from, DataType type) = 0;
  virtual void written(std::size_t layer, std::int64_t first, std::int64_t count) = 0;
  // Usage: fetch() once for `count` positions of a part, from `first` on, then read() from these.
  virtual void fetch(std::size_t part, std::int64_t first, std::int64_t count) = 0;
  virtual void read(const CacheRows& rows, std::byte* to, DataType type) = 0;
  // Copies positions 0 .. count - 1 from another cache of the same device.
  virtual void copy(CacheMemory& from, std::int64_t count) = 0;
  // To be held while another device, or the host, reads rows. A run of this device holds it itself.
  virtual std::unique_lock<std::mutex> lock() { return {}; }
};

}  // namespace flownpu::transformer
