// SPDX-License-Identifier: Apache-2.0
// Keys and values of a sequence in a buffer of the array, in bf16 and in the layout of the
// programs; those of callers' int8 tensors also in int8, behind them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "ops/npu/artifacts/program_record.h"
#include "ops/npu/driver/runtime.h"
#include "ops/npu/nodes/decoder_shape.h"
#include "ops/transformer/cache/memory.h"

namespace flownpu::npu {

// Converts `count` elements of a key or value of a tensor, a row of int8 with its scale, to bf16.
void read_row(const std::byte* from, DataType type, std::byte* to, std::int64_t count);

// Throws Error if `bytes` bytes in this layout have no room for `context` positions of such a
// decoder.
void check_layout(const DecoderShape& shape, std::int64_t context, const CacheLayout& layout,
                  std::size_t bytes);

class ArrayCacheMemory final : public transformer::CacheMemory {
 public:
  // The runtime must outlive it. Throws DeviceError (kMemory).
  ArrayCacheMemory(Runtime& runtime, const DecoderShape& shape, const CacheLayout& layout,
                   std::size_t bytes);

  Buffer& buffer() { return *buffer_; }

  // Does nothing: a program's cache has a fixed size, and the step has checked the positions.
  void reserve(std::int64_t /*positions*/) override {}
  void write(const transformer::CacheRows& rows, const std::byte* from, DataType type) override;
  void written(std::size_t layer, std::int64_t first, std::int64_t count) override;
  void fetch(std::size_t part, std::int64_t first, std::int64_t count) override;
  void read(const transformer::CacheRows& rows, std::byte* to, DataType type) override;
  void copy(transformer::CacheMemory& from, std::int64_t count) override;

 private:
  // Keys and values of one type. Distances in bytes, as in CacheLayout.
  struct Region {
    std::size_t begin, layer, position, head, value;

    std::size_t offset(std::size_t of_layer, std::int64_t of_position) const {
      return begin + of_layer * layer + static_cast<std::size_t>(of_position) * position;
    }
  };
  std::byte* row(const Region& region, const transformer::CacheRows& rows, std::int64_t number);
  // The order of the elements of such rows; empty: the graph's.
  std::span<const std::int64_t> order_of(const transformer::CacheRows& rows) const {
    return rows.part % 2 == 0 ? std::span<const std::int64_t>(key_order_)
                              : std::span<const std::int64_t>();
  }

  std::size_t layers_;
  std::int64_t head_size_;
  // Callers' tensors have keys in the graph's order: the place there of each element; empty: the
  // same order.
  std::vector<std::int64_t> key_order_;
  std::vector<Region> regions_;  // in bf16; then, if there is one, in int8
  std::unique_ptr<Buffer> buffer_;
};

}  // namespace flownpu::npu
