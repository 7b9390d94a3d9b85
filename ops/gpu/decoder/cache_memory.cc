// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/decoder/cache_memory.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "ops/error.h"
#include "ops/gpu/opencl/status.h"
#include "ops/nodes/flow_qkv_attention.h"

namespace flownpu::gpu {

DeviceCacheMemory::DeviceCacheMemory(std::shared_ptr<Context> context,
                                     const transformer::Decoder& decoder, DataType type)
    : context_(std::move(context)),
      count_(2 * decoder.attentions()),
      heads_(decoder.attention().kv_heads),
      head_size_(decoder.attention().head_size),
      positions_(decoder.positions),
      type_(type) {}

std::size_t DeviceCacheMemory::row_bytes() const {
  return static_cast<std::size_t>(cache_row_bytes(type_, head_size_));
}

std::int64_t DeviceCacheMemory::position_bytes() const {
  return static_cast<std::int64_t>(count_ * row_bytes()) * heads_;
}

std::size_t DeviceCacheMemory::offset(std::int64_t head, std::int64_t position) const {
  return static_cast<std::size_t>(head * capacity_ + position) * row_bytes();
}

void DeviceCacheMemory::check_room(std::int64_t positions) const {
  const DeviceFacts& facts = context_->facts();
  const std::int64_t in_use = context_->live_bytes() - capacity_ * position_bytes();
  const std::int64_t most_of_part =
      std::min<std::int64_t>(facts.allocation, std::numeric_limits<std::int32_t>::max());
  const std::int64_t fit =
      std::min((facts.memory - in_use) / position_bytes(),
               most_of_part / (heads_ * static_cast<std::int64_t>(row_bytes())));
  if (positions <= fit) return;
  unsupported("expected a KV cache that fits ", facts.title(), ", got ", positions,
              " positions of ", position_bytes(), " bytes: it has ", facts.memory,
              " bytes, of which ", in_use, " are in use, and buffers of at most ", most_of_part,
              "; there is room for ", std::max<std::int64_t>(fit, 0),
              " positions: shorten the context, or set the provider option on_unsupported to cpu");
}

void DeviceCacheMemory::reserve(std::int64_t positions) {
  if (positions <= capacity_) return;
  std::int64_t capacity = std::max(positions, std::min(capacity_ + capacity_ / 2, positions_));
  check_room(capacity);
  std::vector<Buffer> parts;
  try {
    for (std::size_t part = 0; part < count_; ++part)
      parts.push_back(
          context_->allocate(static_cast<std::size_t>(heads_ * capacity) * row_bytes()));
  } catch (const GpuError& error) {
    if (error.failure() != Failure::kMemory) throw;
    const auto had = static_cast<std::int64_t>(parts.size() * row_bytes()) * heads_ * capacity;
    throw Unsupported(std::string(error.what()) + ": it is a part of a KV cache of " +
                      std::to_string(capacity) + " positions of " +
                      std::to_string(position_bytes()) + " bytes, of which there was room for " +
                      std::to_string(had / position_bytes()) +
                      " positions: shorten the context, or set the provider option "
                      "on_unsupported to cpu");
  }
  for (std::size_t part = 0; part < parts_.size(); ++part)
    copy_part(parts_[part], capacity_, parts[part], capacity, capacity_);
  context_->wait();  // Before what is copied from is freed.
  parts_ = std::move(parts);
  capacity_ = capacity;
}

void DeviceCacheMemory::copy_part(const Buffer& from, std::int64_t capacity, const Buffer& to,
                                  std::int64_t to_capacity, std::int64_t count) {
  for (std::int64_t head = 0; head < heads_; ++head)
    context_->copy(from, static_cast<std::size_t>(head * capacity) * row_bytes(), to,
                   static_cast<std::size_t>(head * to_capacity) * row_bytes(),
                   static_cast<std::size_t>(count) * row_bytes());
}

void DeviceCacheMemory::write(const transformer::CacheRows& rows, const std::byte* from,
                              DataType /*type*/) {
  context_->write(parts_[rows.part], {from, static_cast<std::size_t>(rows.count) * row_bytes()},
                  offset(rows.head, rows.first));
}

void DeviceCacheMemory::written(std::size_t /*layer*/, std::int64_t /*first*/,
                                std::int64_t /*count*/) {}

void DeviceCacheMemory::fetch(std::size_t /*part*/, std::int64_t /*first*/,
                              std::int64_t /*count*/) {}

void DeviceCacheMemory::read(const transformer::CacheRows& rows, std::byte* to, DataType /*type*/) {
  context_->read(parts_[rows.part], {to, static_cast<std::size_t>(rows.count) * row_bytes()},
                 offset(rows.head, rows.first));
}

void DeviceCacheMemory::copy(transformer::CacheMemory& from, std::int64_t count) {
  const auto& other = static_cast<const DeviceCacheMemory&>(from);  // of the same step
  for (std::size_t part = 0; part < count_; ++part)
    copy_part(other.parts_[part], other.capacity_, parts_[part], capacity_, count);
}

}  // namespace flownpu::gpu
