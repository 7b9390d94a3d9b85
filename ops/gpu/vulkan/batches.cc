// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/vulkan/batches.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "ops/cancellation.h"
#include "ops/gpu/vulkan/loader.h"

namespace flownpu::gpu {
namespace {

// Commands of a batch: those of a token of most models, so that it is one submission.
constexpr std::uint32_t kCommands = 256;
// Bytes of all their arguments: 256 times 32 buffers and 64 parameters. Each begins at a multiple
// of the size of an address.
constexpr std::size_t kArguments = std::size_t{kCommands} * (32 * 8 + 64 * 4);
// The batches that are kept to be submitted again: a token's, and those of a graph's or a prompt's.
constexpr std::size_t kKept = 16;
// The uses that are compared; a barrier behind so many loses little.
constexpr std::size_t kMostUsed = 256;
constexpr std::size_t kAlignment = 8;
// The most times that are kept if nobody takes them.
constexpr std::size_t kMostTimes = 1U << 16U;
// How long to wait before the host looks whether it was cancelled.
constexpr std::chrono::milliseconds kPause{20};

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

Batches::Batches(std::shared_ptr<OpenedDevice> device, const VulkanDevice& found, vk::Handle layout,
                 Counts& counts)
    : device_(std::move(device)), layout_(layout), tick_ns_(found.tick_ns), counts_(counts) {
  const vk::CommandPoolCreateInfo info{.family = found.queue_family};
  check_vulkan(vulkan().vkCreateCommandPool(device_->handle(), &info, nullptr, &pool_),
               "vkCreateCommandPool", "opening " + found.facts.title());
}

Batches::~Batches() {
  if (pool_ == 0) return;
  for (auto* batches : {&submitted_, &free_})
    for (const std::unique_ptr<Batch>& one : *batches) destroy(*one);
  vulkan().vkDestroyCommandPool(device_->handle(), pool_, nullptr);
}

void Batches::abandon() {
  pool_ = 0;
  // Never freed: the device may still use their memory.
  // NOLINTBEGIN(bugprone-unused-return-value)
  for (auto* batches : {&submitted_, &free_})
    for (std::unique_ptr<Batch>& one : *batches) one.release();
  // NOLINTEND(bugprone-unused-return-value)
}

std::unique_ptr<Batches::Batch> Batches::make() const {
  auto batch = std::make_unique<Batch>();
  const std::string what = "a batch of commands";
  const vk::CommandBufferAllocateInfo info{.pool = pool_};
  check_vulkan(vulkan().vkAllocateCommandBuffers(device_->handle(), &info, &batch->commands),
               "vkAllocateCommandBuffers", what);
  const vk::FenceCreateInfo fence;
  check_vulkan(vulkan().vkCreateFence(device_->handle(), &fence, nullptr, &batch->fence),
               "vkCreateFence", what);
  if (tick_ns_ > 0) {
    const vk::QueryPoolCreateInfo queries{.count = 2 * kCommands};
    check_vulkan(vulkan().vkCreateQueryPool(device_->handle(), &queries, nullptr, &batch->queries),
                 "vkCreateQueryPool", what);
  }
  batch->arguments = device_->allocate(kArguments, MemoryUse::kStaging, what);
  return batch;
}

// The command buffer goes with its pool.
void Batches::destroy(Batch& batch) const {
  vulkan().vkDestroyFence(device_->handle(), batch.fence, nullptr);
  vulkan().vkDestroyQueryPool(device_->handle(), batch.queries, nullptr);
  device_->free(std::move(batch.arguments));
}

std::size_t Batches::begin_command(std::size_t bytes_of_arguments) {
  if (commands_.size() == kCommands || arguments_.size() + bytes_of_arguments > kArguments)
    submit();
  const std::size_t place = arguments_.size();
  arguments_.resize(place + (bytes_of_arguments + kAlignment - 1) / kAlignment * kAlignment);
  return place;
}

bool Batches::has_to_wait(std::span<const UsedBuffer> buffers) const {
  if (commands_.empty() || used_.size() > kMostUsed) return true;
  return std::ranges::any_of(buffers, [&](const UsedBuffer& mine) {
    return std::ranges::any_of(used_, [&](const UsedBuffer& other) {
      return mine.buffer == other.buffer && (mine.is_written || other.is_written);
    });
  });
}

// The first command of a batch waits for those of the batches before it.
void Batches::add(Command command, std::span<const UsedBuffer> buffers) {
  command.waits = has_to_wait(buffers);
  if (command.waits) used_.clear();
  if (command.waits) ++counts_.barriers;
  used_.insert(used_.end(), buffers.begin(), buffers.end());
  if (commands_.empty()) device_->set_busy(true);
  commands_.push_back(std::move(command));
}

void Batches::dispatch(const std::string& kernel, vk::Handle pipeline,
                       std::span<const UsedBuffer> buffers,
                       std::span<const std::int32_t> parameters, const Grid& grid,
                       bool takes_time) {
  const std::size_t place =
      begin_command(buffers.size() * sizeof(std::uint64_t) + parameters.size_bytes());
  std::byte* at = arguments_.data() + place;
  for (const UsedBuffer& one : buffers) {
    std::memcpy(at, &one.address, sizeof(one.address));
    at += sizeof(one.address);
  }
  if (!parameters.empty()) std::memcpy(at, parameters.data(), parameters.size_bytes());
  Command command{.kernel = kernel,
                  .is_timed = takes_time && tick_ns_ > 0,
                  .pipeline = pipeline,
                  .arguments = place};
  for (std::size_t axis = 0; axis < 3; ++axis)
    command.groups[axis] = static_cast<std::uint32_t>(grid.groups[axis]);
  add(std::move(command), buffers);
}

void Batches::copy(vk::Handle from, std::size_t from_offset, vk::Handle to, std::size_t to_offset,
                   std::size_t bytes) {
  begin_command(0);
  const std::array<UsedBuffer, 2> used{{{.buffer = from}, {.buffer = to, .is_written = true}}};
  add({.from = from, .to = to, .region = {.from = from_offset, .to = to_offset, .bytes = bytes}},
      used);
}

void Batches::write(vk::Handle to, std::size_t offset, std::span<const std::byte> bytes) {
  const std::size_t place = begin_command(bytes.size());
  std::memcpy(arguments_.data() + place, bytes.data(), bytes.size());
  const std::array<UsedBuffer, 1> used{{{.buffer = to, .is_written = true}}};
  add({.to = to, .region = {.from = place, .to = offset, .bytes = bytes.size()}}, used);
}

// One that has these commands; else the one that was not needed for longest, without commands.
// Copies name buffers, of which none may have been destroyed since.
std::unique_ptr<Batches::Batch> Batches::batch_for(const std::vector<Command>& commands) {
  auto found = std::ranges::find_if(free_, [&](const std::unique_ptr<Batch>& one) {
    return one->destroyed == device_->destroyed() && one->recorded == commands;
  });
  if (found == free_.end() && free_.size() + submitted_.size() < kKept) return make();
  if (found == free_.end()) found = free_.begin();
  if (found == free_.end()) return make();
  std::unique_ptr<Batch> batch = std::move(*found);
  free_.erase(found);
  return batch;
}

void Batches::record(const Batch& batch, const Command& command, std::uint32_t& query) const {
  constexpr vk::Flags kStages = vk::kComputeShaderStage | vk::kTransferStage;
  constexpr vk::MemoryBarrier kBarrier{
      .from = vk::kShaderWrite | vk::kTransferWrite,
      .to = vk::kShaderRead | vk::kShaderWrite | vk::kTransferRead | vk::kTransferWrite};
  if (command.waits)
    vulkan().vkCmdPipelineBarrier(batch.commands, kStages, kStages, 0, 1, &kBarrier, 0, nullptr, 0,
                                  nullptr);
  if (command.kernel.empty()) {
    const vk::Handle from = command.from == 0 ? batch.arguments->buffer : command.from;
    vulkan().vkCmdCopyBuffer(batch.commands, from, command.to, 1, &command.region);
    return;
  }
  const std::uint64_t at = batch.arguments->address + command.arguments;
  vulkan().vkCmdBindPipeline(batch.commands, vk::kBindCompute, command.pipeline);
  vulkan().vkCmdPushConstants(batch.commands, layout_, vk::kComputeStage, 0, sizeof(at), &at);
  if (command.is_timed)
    vulkan().vkCmdWriteTimestamp(batch.commands, vk::kTopOfPipe, batch.queries, query++);
  vulkan().vkCmdDispatch(batch.commands, command.groups[0], command.groups[1], command.groups[2]);
  if (command.is_timed)
    vulkan().vkCmdWriteTimestamp(batch.commands, vk::kBottomOfPipe, batch.queries, query++);
}

// A barrier behind the last one makes all that the commands wrote visible to the host.
void Batches::record(Batch& batch, std::vector<Command> commands) const {
  batch.recorded.clear();
  const std::string what = commands.front().text() + " to " + commands.back().text();
  const vk::CommandBufferBeginInfo info;
  check_vulkan(vulkan().vkBeginCommandBuffer(batch.commands, &info), "vkBeginCommandBuffer", what);
  if (batch.queries != 0)
    vulkan().vkCmdResetQueryPool(batch.commands, batch.queries, 0, 2 * kCommands);
  std::uint32_t query = 0;
  for (const Command& one : commands) record(batch, one, query);
  const vk::MemoryBarrier barrier{.from = vk::kShaderWrite | vk::kTransferWrite,
                                  .to = vk::kHostRead | vk::kHostWrite};
  vulkan().vkCmdPipelineBarrier(batch.commands, vk::kComputeShaderStage | vk::kTransferStage,
                                vk::kHostStage, 0, 1, &barrier, 0, nullptr, 0, nullptr);
  check_vulkan(vulkan().vkEndCommandBuffer(batch.commands), "vkEndCommandBuffer", what);
  batch.recorded = std::move(commands);
  batch.destroyed = device_->destroyed();
}

// If it fails, the commands are gone: the caller's run fails.
void Batches::submit() {
  std::vector<Command> commands = std::exchange(commands_, {});
  const std::vector<std::byte> arguments = std::exchange(arguments_, {});
  used_.clear();
  std::unique_ptr<Batch> batch = batch_for(commands);
  try {
    if (batch->recorded != commands || batch->destroyed != device_->destroyed()) {
      record(*batch, std::move(commands));
      ++counts_.recordings;
    }
    std::memcpy(batch->arguments->mapped, arguments.data(), arguments.size());
    const vk::SubmitInfo info{.commands = &batch->commands};
    batch->submitted_ns = now_ns();
    check_vulkan(vulkan().vkQueueSubmit(device_->queue(), 1, &info, batch->fence), "vkQueueSubmit",
                 batch->recorded.front().text() + " to " + batch->recorded.back().text());
  } catch (const GpuError&) {
    free_.insert(free_.begin(), std::move(batch));
    throw;
  }
  ++counts_.submissions;
  submitted_.push_back(std::move(batch));
}

std::string Batches::text() const {
  if (submitted_.empty()) return "a command";
  const std::string first = submitted_.front()->recorded.front().text();
  const std::string last = submitted_.back()->recorded.back().text();
  return first == last ? first : "one of the commands from " + first + " to " + last;
}

bool Batches::wait(std::chrono::milliseconds limit) {
  if (!commands_.empty()) submit();
  while (!submitted_.empty()) {
    Batch& batch = *submitted_.front();
    const auto begin = std::chrono::steady_clock::now();
    for (;;) {
      check_cancelled();  // commands in the queue go on; the next wait is for them, too
      const vk::Result result = vulkan().vkWaitForFences(device_->handle(), 1, &batch.fence, 1,
                                                         std::chrono::nanoseconds(kPause).count());
      if (result == vk::kSuccess) break;
      if (result != vk::kTimeout) check_vulkan(result, "vkWaitForFences", text());
      if (std::chrono::steady_clock::now() - begin > limit) return false;
    }
    collect(batch);
    check_vulkan(vulkan().vkResetFences(device_->handle(), 1, &batch.fence), "vkResetFences",
                 text());
    free_.push_back(std::move(submitted_.front()));
    submitted_.erase(submitted_.begin());
  }
  device_->set_busy(false);
  return true;
}

// A kernel begins after its batch was submitted, so the largest difference between that time and a
// beginning, by the device's clock, is nearest to the difference of the clocks.
void Batches::collect(const Batch& batch) {
  std::vector<const std::string*> timed;
  for (const Command& one : batch.recorded)
    if (one.is_timed) timed.push_back(&one.kernel);
  if (timed.empty()) return;
  std::vector<std::uint64_t> ticks(2 * timed.size());
  check_vulkan(vulkan().vkGetQueryPoolResults(device_->handle(), batch.queries, 0,
                                              static_cast<std::uint32_t>(ticks.size()),
                                              ticks.size() * sizeof(ticks[0]), ticks.data(),
                                              sizeof(ticks[0]), vk::kResults64 | vk::kResultsWait),
               "vkGetQueryPoolResults", "times of kernels");
  const auto ns = [&](std::size_t i) {
    return static_cast<std::int64_t>(static_cast<double>(ticks[i]) * tick_ns_);
  };
  const std::int64_t apart = batch.submitted_ns - ns(0);
  for (std::size_t i = 0; i < timed.size() && times_.size() < kMostTimes; ++i) {
    const auto elapsed = static_cast<double>(ticks[2 * i + 1] - ticks[2 * i]) * tick_ns_;
    times_.push_back({*timed[i], elapsed * 1e-9, ns(2 * i) + apart});
  }
}

}  // namespace flownpu::gpu
