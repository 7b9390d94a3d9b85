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

// Commands of a batch, so that the device computes while the host records. A token has one to four
// batches.
constexpr std::uint32_t kCommands = 64;
// Bytes of all their arguments: 64 times 32 buffers and 64 parameters. Each begins at a multiple of
// the size of an address.
constexpr std::size_t kArguments = std::size_t{kCommands} * (32 * 8 + 64 * 4);
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

Batches::Batches(std::shared_ptr<OpenedDevice> device, const VulkanDevice& found, vk::Handle layout)
    : device_(std::move(device)), layout_(layout), tick_ns_(found.tick_ns) {
  const vk::CommandPoolCreateInfo info{.family = found.queue_family};
  check_vulkan(vulkan().vkCreateCommandPool(device_->handle(), &info, nullptr, &pool_),
               "vkCreateCommandPool", "opening " + found.facts.title());
}

Batches::~Batches() {
  if (pool_ == 0) return;
  for (auto* batches : {&submitted_, &free_})
    for (const std::unique_ptr<Batch>& one : *batches) destroy(*one);
  if (current_ != nullptr) destroy(*current_);
  vulkan().vkDestroyCommandPool(device_->handle(), pool_, nullptr);
}

void Batches::abandon() {
  pool_ = 0;
  // Never freed: the device may still use their memory.
  // NOLINTBEGIN(bugprone-unused-return-value)
  for (auto* batches : {&submitted_, &free_})
    for (std::unique_ptr<Batch>& one : *batches) one.release();
  current_.release();
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

// The batch that is being recorded, behind a barrier for the command.
Batches::Batch& Batches::recording(std::size_t bytes_of_arguments, const std::string& command) {
  if (current_ != nullptr &&
      (current_->count == kCommands || current_->used + bytes_of_arguments > kArguments))
    submit();
  if (current_ == nullptr) {
    if (free_.empty()) free_.push_back(make());
    current_ = std::move(free_.back());
    free_.pop_back();
    const vk::CommandBufferBeginInfo info;
    check_vulkan(vulkan().vkBeginCommandBuffer(current_->commands, &info), "vkBeginCommandBuffer",
                 command);
    if (current_->queries != 0)
      vulkan().vkCmdResetQueryPool(current_->commands, current_->queries, 0, 2 * kCommands);
    current_->first = command;
    device_->set_busy(true);
  }
  constexpr vk::Flags kStages = vk::kComputeShaderStage | vk::kTransferStage;
  const vk::MemoryBarrier barrier{
      .from = vk::kShaderWrite | vk::kTransferWrite,
      .to = vk::kShaderRead | vk::kShaderWrite | vk::kTransferRead | vk::kTransferWrite};
  vulkan().vkCmdPipelineBarrier(current_->commands, kStages, kStages, 0, 1, &barrier, 0, nullptr, 0,
                                nullptr);
  current_->last = command;
  ++current_->count;
  return *current_;
}

void Batches::dispatch(const std::string& kernel, vk::Handle pipeline,
                       std::span<const std::uint64_t> addresses,
                       std::span<const std::int32_t> parameters, const Grid& grid,
                       bool takes_time) {
  const std::size_t bytes =
      (addresses.size_bytes() + parameters.size_bytes() + kAlignment - 1) / kAlignment * kAlignment;
  Batch& batch = recording(bytes, "kernel " + kernel);
  std::byte* place = batch.arguments->mapped + batch.used;
  std::memcpy(place, addresses.data(), addresses.size_bytes());
  if (!parameters.empty())
    std::memcpy(place + addresses.size_bytes(), parameters.data(), parameters.size_bytes());
  const std::uint64_t at = batch.arguments->address + batch.used;
  batch.used += bytes;
  const auto query = static_cast<std::uint32_t>(2 * batch.timed.size());
  const bool timed = takes_time && batch.queries != 0;
  vulkan().vkCmdBindPipeline(batch.commands, vk::kBindCompute, pipeline);
  vulkan().vkCmdPushConstants(batch.commands, layout_, vk::kComputeStage, 0, sizeof(at), &at);
  if (timed) vulkan().vkCmdWriteTimestamp(batch.commands, vk::kTopOfPipe, batch.queries, query);
  vulkan().vkCmdDispatch(batch.commands, static_cast<std::uint32_t>(grid.groups[0]),
                         static_cast<std::uint32_t>(grid.groups[1]),
                         static_cast<std::uint32_t>(grid.groups[2]));
  if (!timed) return;
  vulkan().vkCmdWriteTimestamp(batch.commands, vk::kBottomOfPipe, batch.queries, query + 1);
  batch.timed.push_back(kernel);
}

void Batches::copy(vk::Handle from, std::size_t from_offset, vk::Handle to, std::size_t to_offset,
                   std::size_t bytes) {
  Batch& batch = recording(0, "a copy");
  const vk::BufferCopy region{.from = from_offset, .to = to_offset, .bytes = bytes};
  vulkan().vkCmdCopyBuffer(batch.commands, from, to, 1, &region);
}

// A barrier makes all that the commands wrote visible to the host.
void Batches::submit() {
  const vk::MemoryBarrier barrier{.from = vk::kShaderWrite | vk::kTransferWrite,
                                  .to = vk::kHostRead | vk::kHostWrite};
  vulkan().vkCmdPipelineBarrier(current_->commands, vk::kComputeShaderStage | vk::kTransferStage,
                                vk::kHostStage, 0, 1, &barrier, 0, nullptr, 0, nullptr);
  const std::string what = current_->first + " to " + current_->last;
  check_vulkan(vulkan().vkEndCommandBuffer(current_->commands), "vkEndCommandBuffer", what);
  const vk::SubmitInfo info{.commands = &current_->commands};
  current_->submitted_ns = now_ns();
  check_vulkan(vulkan().vkQueueSubmit(device_->queue(), 1, &info, current_->fence), "vkQueueSubmit",
               what);
  submitted_.push_back(std::move(current_));
}

std::string Batches::text() const {
  if (submitted_.empty()) return "a command";
  const std::string& first = submitted_.front()->first;
  const std::string& last = submitted_.back()->last;
  return first == last ? first : "one of the commands from " + first + " to " + last;
}

bool Batches::wait(std::chrono::milliseconds limit) {
  if (current_ != nullptr) submit();
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
    batch.used = 0;
    batch.count = 0;
    batch.timed.clear();
    free_.push_back(std::move(submitted_.front()));
    submitted_.erase(submitted_.begin());
  }
  device_->set_busy(false);
  return true;
}

// A kernel begins after its batch was submitted, so the largest difference between that time and a
// beginning, by the device's clock, is nearest to the difference of the clocks.
void Batches::collect(const Batch& batch) {
  if (batch.timed.empty()) return;
  std::vector<std::uint64_t> ticks(2 * batch.timed.size());
  check_vulkan(vulkan().vkGetQueryPoolResults(device_->handle(), batch.queries, 0,
                                              static_cast<std::uint32_t>(ticks.size()),
                                              ticks.size() * sizeof(ticks[0]), ticks.data(),
                                              sizeof(ticks[0]), vk::kResults64 | vk::kResultsWait),
               "vkGetQueryPoolResults", "times of kernels");
  const auto ns = [&](std::size_t i) {
    return static_cast<std::int64_t>(static_cast<double>(ticks[i]) * tick_ns_);
  };
  const std::int64_t apart = batch.submitted_ns - ns(0);
  for (std::size_t i = 0; i < batch.timed.size() && times_.size() < kMostTimes; ++i) {
    const auto elapsed = static_cast<double>(ticks[2 * i + 1] - ticks[2 * i]) * tick_ns_;
    times_.push_back({batch.timed[i], elapsed * 1e-9, ns(2 * i) + apart});
  }
}

}  // namespace flownpu::gpu
