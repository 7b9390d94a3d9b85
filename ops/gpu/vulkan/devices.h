// SPDX-License-Identifier: Apache-2.0
// The Vulkan devices of this machine.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ops/gpu/context/facts.h"
#include "ops/gpu/vulkan/abi.h"

namespace flownpu::gpu {

struct VulkanDevice {
  vk::PhysicalDevice handle = nullptr;
  DeviceFacts facts;
  // Why kernels cannot run on it; empty if they can.
  std::string missing;
  std::uint32_t queue_family = 0;
  // Nanoseconds of a tick of the device's clock; 0: it has none.
  double tick_ns = 0;
  std::uint32_t most_groups[3] = {};
  // The alignment of the host's memory that it takes in place; 0: it takes none.
  std::uint64_t host_alignment = 0;
  // The driver's properties on which compiled kernels depend, as text.
  std::string driver_key;
};

// All devices. Throws GpuError where a call fails.
std::vector<VulkanDevice> vulkan_devices();
// The first device whose title contains `wanted`; for "" the first GPU, else the first of any kind.
// Throws GpuError (kNoLoader, kNoPlatform, kNoDevice).
VulkanDevice choose_vulkan_device(const std::string& wanted);

}  // namespace flownpu::gpu
