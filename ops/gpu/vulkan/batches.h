// SPDX-License-Identifier: Apache-2.0
// Commands, recorded one behind the other and submitted in batches. Each waits for the one before
// it: the kernels of a decoder read what the last one wrote.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ops/gpu/context/context.h"
#include "ops/gpu/vulkan/memory.h"

namespace flownpu::gpu {

class Batches {
 public:
  Batches(std::shared_ptr<OpenedDevice> device, const VulkanDevice& found, vk::Handle layout);
  Batches(const Batches&) = delete;
  Batches& operator=(const Batches&) = delete;
  ~Batches();

  // Commands. A dispatch's arguments are the addresses of buffers, and behind them parameters; its
  // time is taken if the device has a clock.
  void dispatch(const std::string& kernel, vk::Handle pipeline,
                std::span<const std::uint64_t> addresses, std::span<const std::int32_t> parameters,
                const Grid& grid, bool takes_time);
  void copy(vk::Handle from, std::size_t from_offset, vk::Handle to, std::size_t to_offset,
            std::size_t bytes);

  // Submits what is recorded, and waits for all; false if a batch did not end within the limit.
  bool wait(std::chrono::milliseconds limit);
  bool has_commands() const { return current_ != nullptr || !submitted_.empty(); }
  // The first and last commands of the batches that are not waited for.
  std::string text() const;
  std::vector<KernelTime> take_times() { return std::exchange(times_, {}); }
  // Leaves everything to the process.
  void abandon();

 private:
  struct Batch {
    vk::CommandBuffer commands = nullptr;
    vk::Handle fence = 0;
    vk::Handle queries = 0;
    std::unique_ptr<OpenedDevice::Piece> arguments;
    std::size_t used = 0;     // bytes of arguments
    std::uint32_t count = 0;  // of commands
    std::vector<std::string> timed;
    std::string first;
    std::string last;
    std::int64_t submitted_ns = 0;
  };

  Batch& recording(std::size_t bytes_of_arguments, const std::string& command);
  std::unique_ptr<Batch> make() const;
  void destroy(Batch& batch) const;
  void submit();
  void collect(const Batch& batch);

  std::shared_ptr<OpenedDevice> device_;
  vk::Handle layout_;
  double tick_ns_;
  vk::Handle pool_ = 0;
  std::unique_ptr<Batch> current_;
  std::vector<std::unique_ptr<Batch>> submitted_;
  std::vector<std::unique_ptr<Batch>> free_;
  std::vector<KernelTime> times_;
};

}  // namespace flownpu::gpu
