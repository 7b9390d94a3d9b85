// SPDX-License-Identifier: Apache-2.0
// A context of Vulkan: one device with one queue.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ops/gpu/context/context.h"
#include "ops/gpu/vulkan/batches.h"
#include "ops/gpu/vulkan/devices.h"
#include "ops/gpu/vulkan/memory.h"

namespace flownpu::gpu {

class VulkanContext final : public Context {
 public:
  explicit VulkanContext(VulkanDevice device,
                         std::filesystem::path cache_folder = default_cache_folder());
  ~VulkanContext() override;

  const char* api() const override { return "Vulkan"; }
  const Dialect& dialect() const override { return spirv_for_vulkan(); }
  std::string identity() const override;
  Buffer allocate(std::size_t bytes) override;
  Buffer use(std::span<const std::byte> memory, std::shared_ptr<const void> owner) override;
  Buffer image_of(const Buffer& buffer) override;
  void write(const Buffer& buffer, std::span<const std::byte> from, std::size_t offset) override;
  void read(const Buffer& buffer, std::span<std::byte> to, std::size_t offset) override;
  void copy(const Buffer& from, std::size_t from_offset, const Buffer& to, std::size_t to_offset,
            std::size_t bytes) override;
  void launch(const CompiledKernel& kernel, std::span<const KernelArgument> arguments,
              const Grid& grid) override;
  void wait() override;
  std::vector<KernelTime> take_times() override;

 private:
  class Kernel;

  std::shared_ptr<const CompiledKernel> compile_source(const KernelDescription& kernel,
                                                       const std::string& source,
                                                       const std::string& key,
                                                       std::vector<bool> writes) override;
  void check_own() const override;
  // Calls `act`, and remembers that the device failed if a command did.
  template <typename Act>
  auto guarded(Act act);
  void check_groups(const CompiledKernel& kernel, const Grid& grid) const;
  vk::Handle build(const KernelDescription& kernel, const std::string& source,
                   const std::string& key);
  OpenedDevice::Piece& staging();

  VulkanDevice found_;
  std::shared_ptr<OpenedDevice> device_;
  vk::Handle layout_ = 0;
  std::unique_ptr<Batches> batches_;
  std::unique_ptr<OpenedDevice::Piece> staging_;
  std::vector<UsedBuffer> used_;
  std::vector<std::int32_t> parameters_;
};

}  // namespace flownpu::gpu
