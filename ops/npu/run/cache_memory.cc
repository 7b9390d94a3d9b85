// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/run/cache_memory.h"

#include <cstring>

#include "ops/error.h"
#include "ops/formats/numbers.h"
#include "ops/nodes/kv_cache.h"

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

// Bytes of a position in int8.
std::size_t int8_position(const DecoderShape& shape) {
  const transformer::Attention& attention = shape.attention();
  return static_cast<std::size_t>(2 * attention.kv_heads * padded_int8_row(attention.head_size));
}

// Element order[i] of a row becomes element i (`forth`), or the other way round; without an order
// nothing is done.
template <typename T, bool forth>
void reorder(std::span<const std::int64_t> order, std::byte* row) {
  std::vector<T> before(order.size());
  std::vector<T> after(order.size());
  if (order.empty()) return;
  std::memcpy(before.data(), row, before.size() * sizeof(T));
  for (std::size_t i = 0; i < order.size(); ++i) {
    const auto other = static_cast<std::size_t>(order[i]);
    after[forth ? i : other] = before[forth ? other : i];
  }
  std::memcpy(row, after.data(), after.size() * sizeof(T));
}

}  // namespace

void read_row(const std::byte* from, DataType type, std::byte* to, std::int64_t count) {
  if (type == DataType::kBFloat16)
    std::memcpy(to, from, static_cast<std::size_t>(count) * kBFloat16Bytes);
  else if (type == DataType::kFloat16)
    convert<Bits, Bits>(from, to, count, [](Bits half) { return to_bfloat16(from_half(half)); });
  else if (type == DataType::kInt8) {
    float scale = 0;
    std::memcpy(&scale, from + count, sizeof scale);
    convert<std::int8_t, Bits>(from, to, count, [scale](std::int8_t code) {
      return to_bfloat16(scale * static_cast<float>(code));
    });
  } else
    convert<float, Bits>(from, to, count, to_bfloat16);
}

void check_layout(const DecoderShape& shape, std::int64_t context, const CacheLayout& layout,
                  std::size_t bytes) {
  const std::size_t vector = shape.angle_bytes();
  const auto heads = static_cast<std::size_t>(shape.attention().kv_heads);
  if (layout.value < vector || layout.head < layout.value + vector ||
      layout.position / heads < layout.head ||
      layout.layer / layout.position < static_cast<std::size_t>(context) ||
      bytes / layout.layer < shape.attentions()) {
    fail("expected a KV cache with room for ", shape.attentions(), " layers of ", context,
         " positions of ", heads, " keys and values of ", vector, " bytes, got ", bytes, " bytes, ",
         layout.layer, " bytes a layer, ", layout.position, " a position, ", layout.head,
         " a head, values ", layout.value, " behind their keys");
  }
  const std::size_t in_int8 =
      shape.attentions() * (layout.layer / layout.position) * int8_position(shape);
  const std::int64_t d = shape.attention().head_size;
  const bool fits = padded_int8_row(d) >= d + kInt8ScaleBytes &&
                    layout.int8_rows >= shape.attentions() * layout.layer &&
                    layout.int8_rows <= bytes && bytes - layout.int8_rows >= in_int8;
  if (shape.attention().int8_cache ? !fits : layout.int8_rows != 0) {
    fail("expected ", shape.attention().int8_cache ? in_int8 : 0, " bytes of keys and values in ",
         "int8 behind those in bf16, got ", bytes, " bytes with int8 from ", layout.int8_rows,
         " on");
  }
}

ArrayCacheMemory::ArrayCacheMemory(Runtime& runtime, const DecoderShape& shape,
                                   const CacheLayout& layout, std::size_t bytes)
    : layers_(shape.attentions()),
      head_size_(shape.attention().head_size),
      key_order_(shape.partly_rotated() ? shape.head_order() : std::vector<std::int64_t>{}),
      regions_{{0, layout.layer, layout.position, layout.head, layout.value}},
      buffer_(runtime.allocate(bytes)) {
  if (layout.int8_rows != 0) {
    const auto row = static_cast<std::size_t>(padded_int8_row(head_size_));
    const std::size_t position = int8_position(shape);
    regions_.push_back(
        {layout.int8_rows, layout.layer / layout.position * position, position, 2 * row, row});
  }
  buffer_->to_device(0, bytes);  // Zeros, because the array's memory need not hold numbers.
}

std::byte* ArrayCacheMemory::row(const Region& region, const transformer::CacheRows& rows,
                                 std::int64_t number) {
  return buffer_->bytes().data() + region.offset(rows.part / 2, rows.first + number) +
         static_cast<std::size_t>(rows.head) * region.head + rows.part % 2 * region.value;
}

void ArrayCacheMemory::write(const transformer::CacheRows& rows, const std::byte* from,
                             DataType type) {
  const auto row_bytes = static_cast<std::size_t>(cache_row_bytes(type, head_size_));
  for (std::int64_t i = 0; i < rows.count; ++i, from += row_bytes) {
    std::byte* to = row(regions_.front(), rows, i);
    read_row(from, type, to, head_size_);
    reorder<Bits, true>(order_of(rows), to);
    if (type != DataType::kInt8) continue;
    std::byte* codes = row(regions_.back(), rows, i);
    std::memcpy(codes, from, row_bytes);
    reorder<std::int8_t, true>(order_of(rows), codes);
  }
}

void ArrayCacheMemory::written(std::size_t layer, std::int64_t first, std::int64_t count) {
  for (const Region& region : regions_)
    buffer_->to_device(region.offset(layer, first),
                       static_cast<std::size_t>(count) * region.position);
}

void ArrayCacheMemory::fetch(std::size_t part, std::int64_t first, std::int64_t count) {
  const Region& region = regions_.back();
  buffer_->to_host(region.offset(part / 2, first),
                   static_cast<std::size_t>(count) * region.position);
}

void ArrayCacheMemory::read(const transformer::CacheRows& rows, std::byte* to, DataType type) {
  const auto row_bytes = static_cast<std::size_t>(cache_row_bytes(type, head_size_));
  std::vector<std::byte> kept(static_cast<std::size_t>(head_size_) * kBFloat16Bytes);
  for (std::int64_t i = 0; i < rows.count; ++i, to += row_bytes) {
    const std::byte* from = row(regions_.back(), rows, i);
    if (type == DataType::kInt8) {
      std::memcpy(to, from, row_bytes);
      reorder<std::int8_t, false>(order_of(rows), to);
      continue;
    }
    std::memcpy(kept.data(), from, kept.size());
    reorder<Bits, false>(order_of(rows), kept.data());
    write_row(kept.data(), type, to, head_size_);
  }
}

void ArrayCacheMemory::copy(transformer::CacheMemory& from, std::int64_t count) {
  Buffer& source = static_cast<ArrayCacheMemory&>(from).buffer();
  for (const Region& region : regions_) {
    const auto bytes = static_cast<std::size_t>(count) * region.position;
    for (std::size_t layer = 0; layer < layers_; ++layer) {
      const std::size_t begin = region.offset(layer, 0);
      source.to_host(begin, bytes);
      std::memcpy(buffer_->bytes().data() + begin, source.bytes().data() + begin, bytes);
      buffer_->to_device(begin, bytes);
    }
  }
}

}  // namespace flownpu::npu
