// SPDX-License-Identifier: Apache-2.0
#include "tests/npu/xdna_driver/buffers.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace xdna_driver {
namespace {

constexpr std::size_t kPage = 4096;
// XRT aligns its heap to this.
constexpr std::uint64_t kHeapAlignment = std::uint64_t{64} << 20U;
// Where the array sees the heap, whose addresses have 32 bits, and the host's memory.
constexpr std::uint64_t kHeapAddress = kHeapAlignment;
constexpr std::uint64_t kHostAddress = std::uint64_t{1} << 40U;
// More than a machine that runs tests has.
constexpr std::size_t kMost = std::size_t{1} << 40U;
constexpr int kGarbage = 0xA5;

std::uint64_t round_up(std::uint64_t value, std::uint64_t to) { return (value + to - 1) / to * to; }

const char* kind_of(BufferType type) {
  switch (type) {
    case BufferType::kShare:
      return "buffer";
    case BufferType::kHeap:
      return "heap";
    case BufferType::kDevice:
      return "heap buffer";
    case BufferType::kCommand:
      break;
  }
  return "command";
}

}  // namespace

Buffer::Buffer(BufferType type, int file, std::uint64_t offset, std::size_t size,
               std::uint64_t address, std::shared_ptr<Buffer> of_heap)
    : alive_(kind_of(type)),
      type_(type),
      file_(file),
      offset_(offset),
      size_(size),
      address_(address),
      heap_(std::move(of_heap)) {
  if (heap_ != nullptr) {
    host_ = heap_->host() + (address - heap_->address());
  } else {
    void* const mapped = mmap(nullptr, round_up(size, kPage), PROT_READ | PROT_WRITE, MAP_SHARED,
                              file_, static_cast<off_t>(offset));
    if (mapped == MAP_FAILED) throw std::runtime_error("the double has no memory");
    host_ = static_cast<std::byte*>(mapped);
  }
  if (type != BufferType::kHeap) std::memset(host_, kGarbage, size);
  const bool is_apart = type == BufferType::kShare || type == BufferType::kDevice;
  if (is_apart && setting("separate", 0) != 0) {
    copy_.assign(size, static_cast<std::byte>(kGarbage));
  }
}

Buffer::~Buffer() {
  if (users_ != 0) violate("a buffer was freed that a call under way uses");
  if (heap_ != nullptr) return;
  munmap(host_, round_up(size_, kPage));
  fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset_),
            static_cast<off_t>(round_up(size_, kPage)));
}

void Buffer::move(bool to_device, std::size_t offset, std::size_t size) {
  // If only hanging calls use the buffer, the host may rescue what they left in it.
  const bool is_rescue = !to_device && users_ == hanging_;
  if (users_ != 0 && !is_rescue) {
    violate("a buffer was moved that a call under way uses");
  }
  if (copy_.empty()) return;
  if (to_device) {
    std::memcpy(copy_.data() + offset, host_ + offset, size);
  } else {
    std::memcpy(host_ + offset, copy_.data() + offset, size);
  }
}

std::int64_t Buffers::create(BufferType type, std::size_t size) {
  const std::lock_guard lock(mutex_);
  if (size == 0) return -EINVAL;
  if (size > kMost) return -ENOMEM;
  std::uint64_t offset = next_offset_;
  std::uint64_t address = kNoAddress;
  std::shared_ptr<Buffer> of_heap;
  switch (type) {
    case BufferType::kHeap:
      offset = round_up(offset, kHeapAlignment);
      address = heap_.empty() ? kHeapAddress : heap_.back()->address() + heap_.back()->size();
      break;
    case BufferType::kDevice: {
      for (const auto& heap : heap_) {
        const std::optional<std::uint64_t> room = room_in(*heap, size);
        if (!room) continue;
        address = *room;
        of_heap = heap;
        break;
      }
      if (of_heap == nullptr) return -EAGAIN;
      break;
    }
    case BufferType::kShare:
    case BufferType::kCommand:
      address = kHostAddress + offset;
      break;
    default:
      return -EINVAL;
  }
  auto made = std::make_shared<Buffer>(type, file_, offset, size, address, of_heap);
  if (of_heap == nullptr) next_offset_ = offset + round_up(size, kPage);
  if (type == BufferType::kHeap) heap_.push_back(made);
  if (type == BufferType::kShare || type == BufferType::kDevice) by_address_[address] = made;
  by_handle_[next_handle_] = made;
  return next_handle_++;
}

std::optional<std::uint64_t> Buffers::room_in(const Buffer& heap, std::size_t size) {
  const std::uint64_t needed = round_up(size, kPage);
  const std::uint64_t end = heap.address() + heap.size();
  std::uint64_t at = heap.address();
  for (auto part = by_address_.lower_bound(at); part != by_address_.end() && part->first < end;
       ++part) {
    if (part->first - at >= needed) return at;
    at = part->first + round_up(part->second->size(), kPage);
  }
  if (end - at < needed) return std::nullopt;
  return at;
}

bool Buffers::close(std::uint32_t handle) {
  const std::lock_guard lock(mutex_);
  const auto found = by_handle_.find(handle);
  if (found == by_handle_.end()) return false;
  const std::shared_ptr<Buffer> buffer = found->second;
  if (buffer->users() != 0) {
    violate("a buffer was freed that a call under way uses");
  }
  by_handle_.erase(found);
  if (const auto at = by_address_.find(buffer->address());
      at != by_address_.end() && at->second == buffer) {
    by_address_.erase(at);
  }
  std::erase(heap_, buffer);
  return true;
}

std::shared_ptr<Buffer> Buffers::find(std::uint32_t handle) {
  const std::lock_guard lock(mutex_);
  const auto found = by_handle_.find(handle);
  return found == by_handle_.end() ? nullptr : found->second;
}

std::optional<Place> Buffers::at(std::uint64_t address) {
  const std::lock_guard lock(mutex_);
  auto found = by_address_.upper_bound(address);
  if (found == by_address_.begin()) return std::nullopt;
  --found;
  const std::size_t offset = address - found->first;
  if (offset >= found->second->size()) return std::nullopt;
  return Place{found->second, offset};
}

std::size_t Buffers::open_count() {
  const std::lock_guard lock(mutex_);
  return by_handle_.size() - heap_.size();
}

std::size_t Buffers::heap_parts() {
  const std::lock_guard lock(mutex_);
  return heap_.size();
}

void Buffers::clear() {
  const std::lock_guard lock(mutex_);
  by_handle_.clear();
  by_address_.clear();
  heap_.clear();
}

}  // namespace xdna_driver
