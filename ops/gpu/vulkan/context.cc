// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/vulkan/context.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "ops/cancellation.h"
#include "ops/gpu/language/text.h"
#include "ops/gpu/vulkan/loader.h"

namespace flownpu::gpu {
namespace {

// Bytes that pass at a time between the host and memory that it does not see.
constexpr std::size_t kStaging = 4U << 20U;
// Bytes that are written as commands do, and pass beside their arguments, so that the host does not
// wait: a token's hidden state.
constexpr std::size_t kBesideArguments = 32U << 10U;

using Piece = OpenedDevice::Piece;

void release(void* handle) {
  std::unique_ptr<Piece> piece(static_cast<Piece*>(handle));
  OpenedDevice& device = *piece->device;
  device.free(std::move(piece));
}

Piece& piece_of(const Buffer& buffer) { return *static_cast<Piece*>(buffer.handle()); }

}  // namespace

class VulkanContext::Kernel final : public CompiledKernel {
 public:
  Kernel(std::string name, std::vector<bool> writes, std::shared_ptr<OpenedDevice> device,
         vk::Handle pipeline)
      : CompiledKernel(std::move(name), std::move(writes)),
        device_(std::move(device)),
        pipeline_(pipeline) {}
  ~Kernel() override {
    if (!vulkan_is_parents() && !device_->is_abandoned())
      vulkan().vkDestroyPipeline(device_->handle(), pipeline_, nullptr);
  }
  vk::Handle pipeline() const { return pipeline_; }

 private:
  std::shared_ptr<OpenedDevice> device_;
  vk::Handle pipeline_;
};

VulkanContext::VulkanContext(VulkanDevice device, std::filesystem::path cache_folder)
    : Context(device.facts, std::move(cache_folder)),
      found_(std::move(device)),
      device_(std::make_shared<OpenedDevice>(found_)) {
  const vk::PushConstantRange range{.bytes = sizeof(std::uint64_t)};
  const vk::PipelineLayoutCreateInfo info{.range = &range};
  check_vulkan(vulkan().vkCreatePipelineLayout(device_->handle(), &info, nullptr, &layout_),
               "vkCreatePipelineLayout", "opening " + facts().title());
  batches_ = std::make_unique<Batches>(device_, found_, layout_, counts_);
}

VulkanContext::~VulkanContext() {
  const bool is_parents = vulkan_is_parents();
  if (!is_parents) {
    const Cancellable never(nullptr);
    try {
      wait();
    } catch (const GpuError&) {
      given_up_ = true;  // The error was thrown before, or nobody waits for the commands' result.
    }
  }
  if (is_parents || given_up_ || failed_) {
    device_->abandon();
    batches_->abandon();
  }
  batches_.reset();
  kernels_.clear();
  if (staging_ != nullptr) device_->free(std::move(staging_));
  if (!device_->is_abandoned())
    vulkan().vkDestroyPipelineLayout(device_->handle(), layout_, nullptr);
}

void VulkanContext::check_own() const { check_vulkan_is_own(); }

template <typename Act>
auto VulkanContext::guarded(Act act) {
  check_not_given_up();
  try {
    return act();
  } catch (const GpuError& error) {
    failed_ = failed_ || error.failure() == Failure::kCommand;
    throw;
  }
}

std::string VulkanContext::identity() const {
  std::string text;
  for (const std::string& part :
       {facts().platform, facts().name, facts().version, facts().driver, found_.driver_key})
    text += text_of(part.size(), ":", part, "\n");
  return text;
}

Buffer VulkanContext::allocate(std::size_t bytes) {
  const std::size_t size = std::max<std::size_t>(bytes, 1);
  std::unique_ptr<Piece> piece = guarded(
      [&] { return device_->allocate(size, MemoryUse::kKernels, describe_allocation(size)); });
  ++counts_.allocations;
  return {{piece.release(), release}, size, live_};
}

Buffer VulkanContext::use(std::span<const std::byte> memory, std::shared_ptr<const void> owner) {
  std::unique_ptr<Piece> piece = guarded([&] { return device_->import(memory); });
  if (piece == nullptr) return {};
  piece->owner = std::move(owner);
  return {{piece.release(), release}, memory.size(), nullptr};
}

Buffer VulkanContext::image_of(const Buffer& buffer) {
  throw GpuError(Failure::kCommand,
                 text_of("[FlowNPU] device 'gpu': expected a buffer, got an image of ",
                         buffer.bytes(), " bytes: use gpu_weights = buffer, or gpu_api = opencl"));
}

OpenedDevice::Piece& VulkanContext::staging() {
  if (staging_ == nullptr)
    staging_ = device_->allocate(kStaging, MemoryUse::kStaging, describe_allocation(kStaging));
  return *staging_;
}

void VulkanContext::write(const Buffer& buffer, std::span<const std::byte> from,
                          std::size_t offset) {
  if (from.empty()) return;
  const Piece& to = piece_of(buffer);
  counts_.bytes_to_device += static_cast<std::int64_t>(from.size());
  const bool is_idle = !batches_->has_commands();
  if (from.size() <= kBesideArguments && (to.mapped == nullptr || !is_idle))
    return guarded([&] { batches_->write(to.buffer, offset, from); });
  wait();  // kernels may read what is there
  if (to.mapped != nullptr) {
    std::memcpy(to.mapped + offset, from.data(), from.size());
    return;
  }
  guarded([&] {
    for (std::size_t at = 0; at < from.size(); at += kStaging) {
      const std::size_t bytes = std::min(kStaging, from.size() - at);
      std::memcpy(staging().mapped, from.data() + at, bytes);
      batches_->copy(staging().buffer, 0, to.buffer, offset + at, bytes);
      wait();
    }
  });
}

void VulkanContext::read(const Buffer& buffer, std::span<std::byte> to, std::size_t offset) {
  if (to.empty()) return;
  const Piece& from = piece_of(buffer);
  counts_.bytes_to_host += static_cast<std::int64_t>(to.size());
  if (from.mapped != nullptr && from.is_cached) {
    wait();
    std::memcpy(to.data(), from.mapped + offset, to.size());
    return;
  }
  guarded([&] {
    for (std::size_t at = 0; at < to.size(); at += kStaging) {
      const std::size_t bytes = std::min(kStaging, to.size() - at);
      batches_->copy(from.buffer, offset + at, staging().buffer, 0, bytes);
      wait();
      std::memcpy(to.data() + at, staging().mapped, bytes);
    }
  });
}

void VulkanContext::copy(const Buffer& from, std::size_t from_offset, const Buffer& to,
                         std::size_t to_offset, std::size_t bytes) {
  if (bytes == 0) return;
  guarded([&] {
    batches_->copy(piece_of(from).buffer, from_offset, piece_of(to).buffer, to_offset, bytes);
  });
}

std::shared_ptr<const CompiledKernel> VulkanContext::compile_source(const KernelDescription& kernel,
                                                                    const std::string& source,
                                                                    const std::string& key,
                                                                    std::vector<bool> writes) {
  const vk::Handle pipeline = guarded([&] { return build(kernel, source, key); });
  return std::make_shared<const Kernel>(kernel.name, std::move(writes), device_, pipeline);
}

// The driver's cache of one pipeline is kept on disk. It says itself whether it is this driver's.
vk::Handle VulkanContext::build(const KernelDescription& kernel, const std::string& source,
                                const std::string& key) {
  const std::string what = "kernel " + kernel.name + " on " + facts().title();
  const auto kept = cache().find(key);
  vk::PipelineCacheCreateInfo of_cache;
  if (kept) of_cache.bytes = kept->size();
  if (kept) of_cache.data = kept->data();
  vk::Handle known = 0;
  check_vulkan(vulkan().vkCreatePipelineCache(device_->handle(), &of_cache, nullptr, &known),
               "vkCreatePipelineCache", what);
  std::vector<std::uint32_t> words(source.size() / sizeof(std::uint32_t));
  std::memcpy(words.data(), source.data(), words.size() * sizeof(std::uint32_t));
  const vk::ShaderModuleCreateInfo of_module{.bytes = source.size(), .words = words.data()};
  vk::ComputePipelineCreateInfo info;
  info.layout = layout_;
  info.stage.name = kernel.name.c_str();
  vk::RequiredSubgroupSizeCreateInfo subgroups;
  if (kernel.matrices) {
    subgroups.size = static_cast<std::uint32_t>(kernel.matrices->lanes);
    info.stage.next = &subgroups;
    info.stage.flags = vk::kFullSubgroups;
  }
  vk::Handle pipeline = 0;
  vk::Result result =
      vulkan().vkCreateShaderModule(device_->handle(), &of_module, nullptr, &info.stage.module);
  if (result == vk::kSuccess)
    result =
        vulkan().vkCreateComputePipelines(device_->handle(), known, 1, &info, nullptr, &pipeline);
  vulkan().vkDestroyShaderModule(device_->handle(), info.stage.module, nullptr);
  std::size_t bytes = 0;
  std::vector<unsigned char> data;
  if (!kept && result == vk::kSuccess &&
      vulkan().vkGetPipelineCacheData(device_->handle(), known, &bytes, nullptr) == vk::kSuccess) {
    data.resize(bytes);
    if (vulkan().vkGetPipelineCacheData(device_->handle(), known, &bytes, data.data()) ==
        vk::kSuccess)
      cache().keep(key, data);
  }
  vulkan().vkDestroyPipelineCache(device_->handle(), known, nullptr);
  check_vulkan(result, "vkCreateComputePipelines", what);
  ++(kept ? counts_.from_cache : counts_.compiled);
  return pipeline;
}

void VulkanContext::check_groups(const CompiledKernel& kernel, const Grid& grid) const {
  for (std::size_t axis = 0; axis < 3; ++axis)
    if (grid.groups[axis] > std::int64_t{found_.most_groups[axis]})
      throw GpuError(Failure::kCommand,
                     text_of("[FlowNPU] device 'gpu': kernel ", kernel.name(),
                             ": expected at most ", found_.most_groups[axis],
                             " work-groups along axis ", axis, " on ", facts().title(), ", got ",
                             grid.groups[axis], "; use gpu_api = opencl or device = cpu"));
}

void VulkanContext::launch(const CompiledKernel& kernel, std::span<const KernelArgument> arguments,
                           const Grid& grid) {
  check_lanes(kernel, grid);
  if (std::ranges::find(grid.groups, 0) != grid.groups.end()) return;
  check_groups(kernel, grid);
  used_.clear();
  parameters_.clear();
  for (const KernelArgument& argument : arguments) {
    if (const auto* buffer = std::get_if<const Buffer*>(&argument)) {
      const Piece& piece = piece_of(**buffer);
      used_.push_back({piece.buffer, piece.address, kernel.writes(used_.size())});
    } else {
      parameters_.push_back(std::get<std::int32_t>(argument));
    }
  }
  guarded([&] {
    batches_->dispatch(kernel.name(), static_cast<const Kernel&>(kernel).pipeline(), used_,
                       parameters_, grid, takes_times_);
  });
  ++counts_.dispatches;
}

void VulkanContext::wait() {
  guarded([&] {
    if (!batches_->has_commands() || batches_->wait(limit_)) return;
    const std::string what = batches_->text();
    give_up(what);
  });
}

std::vector<KernelTime> VulkanContext::take_times() {
  wait();
  return batches_->take_times();
}

}  // namespace flownpu::gpu
