// SPDX-License-Identifier: Apache-2.0
// Keys and values of a sequence in a buffer that is laid out as the programs have it, in bf16.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "ops/layers/cache_memory.h"
#include "ops/npu/artifacts/program_record.h"
#include "ops/npu/driver/runtime.h"
#include "ops/npu/nodes/decoder_shape.h"

namespace flownpu::npu {

// A row of a tensor of keys or values, of `count` elements, into the bf16 of the array's buffer.
void read_row(const std::byte* from, DataType type, std::byte* to, std::int64_t count);

// Throws Error if the layout has no place for `context` positions of such a decoder in `bytes`.
void check_layout(const DecoderShape& shape, std::int64_t context, const CacheLayout& layout,
                  std::size_t bytes);

class ArrayCacheMemory final : public layers::CacheMemory {
 public:
  // The runtime must outlive it. Throws DeviceError (kMemory).
  ArrayCacheMemory(Runtime& runtime, const DecoderShape& shape, const CacheLayout& layout,
                   std::size_t bytes);

  Buffer& buffer() { return *buffer_; }

  // A program's cache has a fixed size, which the step has compared.
  void reserve(std::int64_t /*positions*/) override {}
  void write(const layers::CacheRows& rows, const std::byte* from, DataType type) override;
  void written(std::int64_t first, std::int64_t count) override;
  void fetch(std::size_t part, std::int64_t count) override;
  void read(const layers::CacheRows& rows, std::byte* to, DataType type) override;
  void copy(layers::CacheMemory& from, std::int64_t count) override;

 private:
  std::size_t offset(std::size_t layer, std::int64_t position) const;
  std::byte* row(const layers::CacheRows& rows, std::int64_t number);

  std::size_t layers_;
  std::int64_t head_size_;
  CacheLayout layout_;
  std::unique_ptr<Buffer> buffer_;
};

}  // namespace flownpu::npu
