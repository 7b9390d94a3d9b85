// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/run/cache_memory.h"

#include <cstring>

#include "ops/error.h"
#include "ops/formats/numbers.h"

namespace flownpu::npu {

namespace {

template <typename From, typename To, typename Convert>
void convert(const std::byte* from, std::byte* to, std::int64_t count, const Convert& convert) {
  for (std::int64_t i = 0; i < count; ++i) {
    From value{};
    std::memcpy(&value, from + i * sizeof value, sizeof value);
    const To made = convert(value);
    std::memcpy(to + i * sizeof made, &made, sizeof made);
  }
}

using Bits = std::uint16_t;

void write_row(const std::byte* from, DataType type, std::byte* to, std::int64_t count) {
  if (type == DataType::kBFloat16)
    std::memcpy(to, from, static_cast<std::size_t>(count) * kBFloat16Bytes);
  else if (type == DataType::kFloat16)
    convert<Bits, Bits>(from, to, count, [](Bits bits) { return to_half(from_bfloat16(bits)); });
  else
    convert<Bits, float>(from, to, count, from_bfloat16);
}

}  // namespace

void read_row(const std::byte* from, DataType type, std::byte* to, std::int64_t count) {
  if (type == DataType::kBFloat16)
    std::memcpy(to, from, static_cast<std::size_t>(count) * kBFloat16Bytes);
  else if (type == DataType::kFloat16)
    convert<Bits, Bits>(from, to, count, [](Bits half) { return to_bfloat16(from_half(half)); });
  else
    convert<float, Bits>(from, to, count, to_bfloat16);
}

void check_layout(const DecoderShape& shape, std::int64_t context, const CacheLayout& layout,
                  std::size_t bytes) {
  const std::size_t vector = shape.angle_bytes();
  const auto heads = static_cast<std::size_t>(shape.attention().kv_heads);
  if (layout.value < vector || layout.head < layout.value + vector ||
      layout.position / heads < layout.head ||
      layout.layer / layout.position < static_cast<std::size_t>(context) ||
      bytes / layout.layer < shape.layers.size()) {
    fail("expected a KV cache with room for ", shape.layers.size(), " layers of ", context,
         " positions of ", heads, " keys and values of ", vector, " bytes, got ", bytes, " bytes, ",
         layout.layer, " bytes a layer, ", layout.position, " a position, ", layout.head,
         " a head, values ", layout.value, " behind their keys");
  }
}

ArrayCacheMemory::ArrayCacheMemory(Runtime& runtime, const DecoderShape& shape,
                                   const CacheLayout& layout, std::size_t bytes)
    : layers_(shape.layers.size()),
      head_size_(shape.attention().head_size),
      key_order_(shape.partly_rotated() ? shape.head_order() : std::vector<std::int64_t>{}),
      layout_(layout),
      buffer_(runtime.allocate(bytes)) {
  buffer_->to_device(0, bytes);  // Zeros, because the array's memory need not hold numbers.
}

std::size_t ArrayCacheMemory::offset(std::size_t layer, std::int64_t position) const {
  return layer * layout_.layer + static_cast<std::size_t>(position) * layout_.position;
}

std::byte* ArrayCacheMemory::row(const transformer::CacheRows& rows, std::int64_t number) {
  return buffer_->bytes().data() + offset(rows.part / 2, rows.first + number) +
         static_cast<std::size_t>(rows.head) * layout_.head + rows.part % 2 * layout_.value;
}

void ArrayCacheMemory::write(const transformer::CacheRows& rows, const std::byte* from,
                             DataType type) {
  const std::size_t row_bytes = static_cast<std::size_t>(head_size_) * size_of(type);
  std::vector<Bits> key(reordered(rows) ? key_order_.size() : 0);
  for (std::int64_t i = 0; i < rows.count; ++i, from += row_bytes) {
    std::byte* to = row(rows, i);
    read_row(from, type, to, head_size_);
    if (key.empty()) continue;
    std::memcpy(key.data(), to, key.size() * sizeof(Bits));
    for (std::size_t at = 0; at < key.size(); ++at)
      std::memcpy(to + at * sizeof(Bits), &key[static_cast<std::size_t>(key_order_[at])],
                  sizeof(Bits));
  }
}

void ArrayCacheMemory::written(std::int64_t first, std::int64_t count) {
  const auto bytes = static_cast<std::size_t>(count) * layout_.position;
  for (std::size_t layer = 0; layer < layers_; ++layer)
    buffer_->to_device(offset(layer, first), bytes);
}

void ArrayCacheMemory::fetch(std::size_t part, std::int64_t count) {
  buffer_->to_host(offset(part / 2, 0), static_cast<std::size_t>(count) * layout_.position);
}

void ArrayCacheMemory::read(const transformer::CacheRows& rows, std::byte* to, DataType type) {
  const std::size_t row_bytes = static_cast<std::size_t>(head_size_) * size_of(type);
  std::vector<Bits> key(reordered(rows) ? key_order_.size() : 0);
  for (std::int64_t i = 0; i < rows.count; ++i, to += row_bytes) {
    const std::byte* from = row(rows, i);
    for (std::size_t at = 0; at < key.size(); ++at)
      std::memcpy(&key[static_cast<std::size_t>(key_order_[at])], from + at * sizeof(Bits),
                  sizeof(Bits));
    write_row(key.empty() ? from : reinterpret_cast<const std::byte*>(key.data()), type, to,
              head_size_);
  }
}

void ArrayCacheMemory::copy(transformer::CacheMemory& from, std::int64_t count) {
  Buffer& source = static_cast<ArrayCacheMemory&>(from).buffer();
  const auto bytes = static_cast<std::size_t>(count) * layout_.position;
  for (std::size_t layer = 0; layer < layers_; ++layer) {
    const std::size_t begin = offset(layer, 0);
    source.to_host(begin, bytes);
    std::memcpy(buffer_->bytes().data() + begin, source.bytes().data() + begin, bytes);
    buffer_->to_device(begin, bytes);
  }
}

}  // namespace flownpu::npu
