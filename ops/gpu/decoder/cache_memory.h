// SPDX-License-Identifier: Apache-2.0
// Keys and values of a sequence in a device's memory. There is a buffer for each part (a layer's
// keys, a layer's values), [kv_heads, capacity, head_size] of the tensors' type; int8 rows include
// their scales. Callers hold the context's mutex.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "ops/gpu/context/context.h"
#include "ops/transformer/cache/memory.h"
#include "ops/transformer/decoder.h"

namespace flownpu::gpu {

class DeviceCacheMemory final : public transformer::CacheMemory {
 public:
  DeviceCacheMemory(std::shared_ptr<Context> context, const transformer::Decoder& decoder,
                    DataType type);

  const Buffer& part(std::size_t number) const { return parts_[number]; }
  std::int64_t capacity() const { return capacity_; }

  // A cache that grows grows at least by half, so that single tokens seldom make it move. Throws
  // Unsupported, with what the device has, what is asked for, and how many positions there would be
  // room for.
  void reserve(std::int64_t positions) override;
  void write(const transformer::CacheRows& rows, const std::byte* from, DataType type) override;
  void written(std::size_t layer, std::int64_t first, std::int64_t count) override;
  void fetch(std::size_t part, std::int64_t first, std::int64_t count) override;
  void read(const transformer::CacheRows& rows, std::byte* to, DataType type) override;
  void copy(transformer::CacheMemory& from, std::int64_t count) override;
  std::unique_lock<std::mutex> lock() override { return std::unique_lock(context_->mutex()); }

 private:
  // Bytes of a position, for one head and one part.
  std::size_t row_bytes() const;
  // Bytes of a position in all heads and parts.
  std::int64_t position_bytes() const;
  std::size_t offset(std::int64_t head, std::int64_t position) const;
  void check_room(std::int64_t positions) const;
  void copy_part(const Buffer& from, std::int64_t capacity, const Buffer& to,
                 std::int64_t to_capacity, std::int64_t count);

  std::shared_ptr<Context> context_;
  std::size_t count_;  // of parts
  std::int64_t heads_;
  std::int64_t head_size_;
  std::int64_t positions_;  // of the model's context
  DataType type_;
  std::int64_t capacity_ = 0;
  std::vector<Buffer> parts_;
};

}  // namespace flownpu::gpu
