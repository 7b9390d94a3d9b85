// SPDX-License-Identifier: Apache-2.0
// The buffers of an open device file. Their memory lies in one sparse file, which is also what the
// program has open as the device: it maps buffers by their offsets, as it does a driver's.
//
// With the setting "separate" (for XRT's Debug.force_driver_sync, with which the driver moves all
// data), the array has its own copy of every buffer, and a missing transfer shows; else host and
// array share the memory, as on an NPU. Memory that nobody has written is garbage.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "tests/npu/xdna_driver/interface.h"
#include "tests/npu/xdna_driver/state.h"

namespace xdna_driver {

class Buffer {
 public:
  // Takes memory of the file from `offset` on; `of_heap`: the heap that it is a part of.
  Buffer(BufferType type, int file, std::uint64_t offset, std::size_t size, std::uint64_t address,
         std::shared_ptr<Buffer> of_heap);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  BufferType type() const { return type_; }
  std::size_t size() const { return size_; }
  std::uint64_t offset() const { return offset_; }
  std::uint64_t address() const { return address_; }
  std::byte* host() { return host_; }
  std::span<std::byte> on_device() { return {copy_.empty() ? host_ : copy_.data(), size_}; }
  void move(bool to_device, std::size_t offset, std::size_t size);
  // How many commands under way use it, and how many of these hang.
  std::atomic<int>& users() { return users_; }
  std::atomic<int>& hanging() { return hanging_; }

 private:
  Alive alive_;
  BufferType type_;
  int file_;
  std::uint64_t offset_;
  std::size_t size_;
  std::uint64_t address_;
  std::shared_ptr<Buffer> heap_;
  std::byte* host_ = nullptr;
  std::vector<std::byte> copy_;
  std::atomic<int> users_{0};
  std::atomic<int> hanging_{0};
};

// A part of a buffer, by its address for the array.
struct Place {
  std::shared_ptr<Buffer> buffer;
  std::size_t offset = 0;
};

// All functions may be called from any thread. Those that look something up return nullptr or
// nullopt if there is none.
class Buffers {
 public:
  explicit Buffers(int file) : file_(file) {}

  // A handle, or a negative error number.
  std::int64_t create(BufferType type, std::size_t size);
  // False: there is no such buffer.
  bool close(std::uint32_t handle);
  std::shared_ptr<Buffer> find(std::uint32_t handle);
  std::optional<Place> at(std::uint64_t address);
  // How many buffers are open, the parts of the heap not counted.
  std::size_t open_count();
  std::size_t heap_parts();
  void clear();

 private:
  std::optional<std::uint64_t> room_in(const Buffer& heap, std::size_t size);

  int file_;
  std::mutex mutex_;
  std::uint32_t next_handle_ = 1;
  std::uint64_t next_offset_ = 0;
  // The heap's parts, in the order in which XRT asked for them.
  std::vector<std::shared_ptr<Buffer>> heap_;
  std::map<std::uint32_t, std::shared_ptr<Buffer>> by_handle_;
  // The buffers that the array can reach.
  std::map<std::uint64_t, std::shared_ptr<Buffer>> by_address_;
};

}  // namespace xdna_driver
