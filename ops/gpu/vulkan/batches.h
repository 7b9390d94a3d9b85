// SPDX-License-Identifier: Apache-2.0
// Commands, collected one behind the other and submitted in batches. A batch of the same commands
// as one before it, such as the next token's, is that one, submitted again: arguments are in memory
// that the host writes, so that positions and buffers may differ. A command waits for those before
// it only if they write what it uses, or use what it writes.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ops/gpu/context/context.h"
#include "ops/gpu/vulkan/memory.h"

namespace flownpu::gpu {

// A buffer among the arguments of a dispatch.
struct UsedBuffer {
  vk::Handle buffer = 0;
  std::uint64_t address = 0;
  bool is_written = false;
};

class Batches {
 public:
  // `counts` outlives it.
  Batches(std::shared_ptr<OpenedDevice> device, const VulkanDevice& found, vk::Handle layout,
          Counts& counts);
  Batches(const Batches&) = delete;
  Batches& operator=(const Batches&) = delete;
  ~Batches();

  // Commands. A dispatch's arguments are the addresses of buffers, and behind them parameters; its
  // time is taken if the device has a clock. The bytes of write() are copied at once; they are at
  // most as many as a batch's arguments (32 KiB).
  void dispatch(const std::string& kernel, vk::Handle pipeline, std::span<const UsedBuffer> buffers,
                std::span<const std::int32_t> parameters, const Grid& grid, bool takes_time);
  void copy(vk::Handle from, std::size_t from_offset, vk::Handle to, std::size_t to_offset,
            std::size_t bytes);
  void write(vk::Handle to, std::size_t offset, std::span<const std::byte> bytes);

  // Submits what is collected, and waits for all; false if a batch did not end within the limit.
  bool wait(std::chrono::milliseconds limit);
  bool has_commands() const { return !commands_.empty() || !submitted_.empty(); }
  // The first and last commands of the batches that are not waited for.
  std::string text() const;
  std::vector<KernelTime> take_times() { return std::exchange(times_, {}); }
  // Leaves everything to the process.
  void abandon();

 private:
  // A command as a command buffer has it. Arguments, which are not here, may differ.
  struct Command {
    std::string kernel = {};  // empty: a copy
    bool waits = false;
    bool is_timed = false;
    vk::Handle pipeline = 0;
    std::size_t arguments = 0;  // where they begin among those of the batch
    std::array<std::uint32_t, 3> groups{};
    vk::Handle from = 0;  // 0: the batch's arguments
    vk::Handle to = 0;
    vk::BufferCopy region = {};

    bool operator==(const Command&) const = default;
    std::string text() const { return kernel.empty() ? "a copy" : "kernel " + kernel; }
  };
  struct Batch {
    vk::CommandBuffer commands = nullptr;
    vk::Handle fence = 0;
    vk::Handle queries = 0;
    std::unique_ptr<OpenedDevice::Piece> arguments;
    std::vector<Command> recorded;
    std::int64_t destroyed = 0;  // pieces, when it was recorded
    std::int64_t submitted_ns = 0;
  };

  // The place for a command's arguments; submits what is collected if it leaves no room.
  std::size_t begin_command(std::size_t bytes_of_arguments);
  void add(Command command, std::span<const UsedBuffer> buffers);
  bool has_to_wait(std::span<const UsedBuffer> buffers) const;
  std::unique_ptr<Batch> make() const;
  void destroy(Batch& batch) const;
  std::unique_ptr<Batch> batch_for(const std::vector<Command>& commands);
  void record(Batch& batch, std::vector<Command> commands) const;
  void record(const Batch& batch, const Command& command, std::uint32_t& query) const;
  void submit();
  void collect(const Batch& batch);

  std::shared_ptr<OpenedDevice> device_;
  vk::Handle layout_;
  double tick_ns_;
  Counts& counts_;
  vk::Handle pool_ = 0;
  // Collected commands, their arguments, and the buffers that they use behind the last barrier.
  std::vector<Command> commands_;
  std::vector<std::byte> arguments_;
  std::vector<UsedBuffer> used_;
  std::vector<std::unique_ptr<Batch>> submitted_;
  std::vector<std::unique_ptr<Batch>> free_;  // the least recently submitted first
  std::vector<KernelTime> times_;
};

}  // namespace flownpu::gpu
