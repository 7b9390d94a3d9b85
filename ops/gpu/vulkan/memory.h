// SPDX-License-Identifier: Apache-2.0
// The opened device and memory of it. Each piece of memory is a buffer of its own, whose address
// kernels get.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "ops/gpu/vulkan/abi.h"
#include "ops/gpu/vulkan/devices.h"

namespace flownpu::gpu {

enum class MemoryUse : std::uint8_t {
  kKernels,  // read and written by kernels; the host may see it
  kStaging,  // read and written by the host, and by copies
};

// A VkDevice with one queue, which lives as long as memory of it. Memory that is freed while
// commands may use it is kept until they have ended.
class OpenedDevice : public std::enable_shared_from_this<OpenedDevice> {
 public:
  struct Piece {
    vk::Handle buffer = 0;
    vk::Handle memory = 0;
    std::uint64_t address = 0;
    std::byte* mapped = nullptr;                  // null: the host does not see it
    bool is_cached = false;                       // the host reads it fast
    std::shared_ptr<const void> owner = nullptr;  // of the host's memory in place
    std::shared_ptr<OpenedDevice> device = nullptr;
  };

  explicit OpenedDevice(const VulkanDevice& device);
  OpenedDevice(const OpenedDevice&) = delete;
  OpenedDevice& operator=(const OpenedDevice&) = delete;
  ~OpenedDevice();

  vk::Device handle() const { return handle_; }
  vk::Queue queue() const { return queue_; }

  // `what`: for messages.
  std::unique_ptr<Piece> allocate(std::size_t bytes, MemoryUse use, const std::string& what);
  // The host's memory in place, for kernels that read it; null if the driver refuses it, as AMD's
  // on Linux does with mapped files. `memory`: of a device with a host_alignment.
  std::unique_ptr<Piece> import(std::span<const std::byte> memory);
  void free(std::unique_ptr<Piece> piece);
  // Whether commands may use memory from now on; when none does, what was kept is freed.
  void set_busy(bool is_busy);
  // Nothing is freed from now on: commands that did not end may use it.
  void abandon();
  bool is_abandoned() const { return is_abandoned_; }
  // How many pieces were destroyed so far: while it stays, so do the handles of all others.
  std::int64_t destroyed() const { return destroyed_; }

 private:
  void destroy(const Piece& piece) const;
  std::uint32_t type_of(std::uint32_t allowed, MemoryUse use) const;

  vk::Device handle_ = nullptr;
  vk::Queue queue_ = nullptr;
  vk::MemoryProperties memory_{};
  bool is_unified_ = false;
  std::uint64_t host_alignment_ = 0;
  std::mutex mutex_;  // guards what follows
  bool is_busy_ = false;
  std::atomic<bool> is_abandoned_ = false;
  mutable std::atomic<std::int64_t> destroyed_ = 0;
  std::vector<std::unique_ptr<Piece>> kept_;
};

}  // namespace flownpu::gpu
