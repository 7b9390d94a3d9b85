// SPDX-License-Identifier: Apache-2.0
// Types, handles and numbers of the part of Vulkan's C interface that FlowNPU calls (abi.h).
#pragma once

#include <cstdint>

namespace flownpu::gpu::vk {

using Result = std::int32_t;
using Flags = std::uint32_t;
using Bool = std::uint32_t;
using Size = std::uint64_t;
// Handle of an object that is not addressed by a pointer.
using Handle = std::uint64_t;

// Opaque handles of the implementation's objects.
using Instance = struct InstanceOfVulkan*;
using PhysicalDevice = struct PhysicalDeviceOfVulkan*;
using Device = struct DeviceOfVulkan*;
using Queue = struct QueueOfVulkan*;
using CommandBuffer = struct CommandBufferOfVulkan*;

inline constexpr Result kSuccess = 0;
inline constexpr Result kTimeout = 2;
inline constexpr Result kIncomplete = 5;
inline constexpr std::uint32_t kVersion13 = (1U << 22U) | (3U << 12U);
inline constexpr Size kWholeSize = ~Size{0};

enum class Structure : std::uint32_t {
  kApplicationInfo = 0,
  kInstanceCreateInfo = 1,
  kDeviceQueueCreateInfo = 2,
  kDeviceCreateInfo = 3,
  kSubmitInfo = 4,
  kMemoryAllocateInfo = 5,
  kFenceCreateInfo = 8,
  kQueryPoolCreateInfo = 11,
  kBufferCreateInfo = 12,
  kShaderModuleCreateInfo = 16,
  kPipelineCacheCreateInfo = 17,
  kPipelineShaderStageCreateInfo = 18,
  kComputePipelineCreateInfo = 29,
  kPipelineLayoutCreateInfo = 30,
  kCommandPoolCreateInfo = 39,
  kCommandBufferAllocateInfo = 40,
  kCommandBufferBeginInfo = 42,
  kMemoryBarrier = 46,
  kVulkan11Features = 49,
  kVulkan12Features = 51,
  kVulkan13Features = 53,
  kPhysicalDeviceFeatures2 = 1000059000,
  kPhysicalDeviceProperties2 = 1000059001,
  kMemoryAllocateFlagsInfo = 1000060000,
  kExternalMemoryBufferCreateInfo = 1000072000,
  kSubgroupProperties = 1000094000,
  kNvidiaProperties = 1000154001,
  kMaintenance3Properties = 1000168000,
  kImportMemoryHostPointerInfo = 1000178000,
  kMemoryHostPointerProperties = 1000178001,
  kExternalMemoryHostProperties = 1000178002,
  kAmdProperties = 1000185000,
  kDriverProperties = 1000196000,
  kRequiredSubgroupSizeCreateInfo = 1000225001,
  kBufferDeviceAddressInfo = 1000244001,
  kCooperativeMatrixFeatures = 1000506000,
  kCooperativeMatrixProperties = 1000506001,
};

enum class Kind : std::uint32_t { kOther, kIntegrated, kDiscrete, kVirtual, kCpu };

// Flags of queues, memory, buffers, stages, accesses and command buffers.
inline constexpr Flags kComputeQueue = 2;
inline constexpr Flags kDeviceLocal = 1;
inline constexpr Flags kHostVisible = 2;
inline constexpr Flags kHostCoherent = 4;
inline constexpr Flags kHostCached = 8;
inline constexpr Flags kTransferSource = 1;
inline constexpr Flags kTransferTarget = 2;
inline constexpr Flags kStorageBuffer = 0x20;
inline constexpr Flags kDeviceAddress = 0x20000;
inline constexpr Flags kAllocateDeviceAddress = 2;
inline constexpr Flags kComputeShaderStage = 0x800;
inline constexpr Flags kTransferStage = 0x1000;
inline constexpr Flags kHostStage = 0x4000;
inline constexpr Flags kBottomOfPipe = 0x2000;
inline constexpr Flags kTopOfPipe = 1;
inline constexpr Flags kShaderRead = 0x20;
inline constexpr Flags kShaderWrite = 0x40;
inline constexpr Flags kTransferRead = 0x800;
inline constexpr Flags kTransferWrite = 0x1000;
inline constexpr Flags kHostRead = 0x2000;
inline constexpr Flags kHostWrite = 0x4000;
inline constexpr Flags kComputeStage = 0x20;
inline constexpr Flags kResettable = 2;
inline constexpr Flags kHostAllocation = 0x80;  // a handle of memory
inline constexpr Flags kFullSubgroups = 2;      // of a pipeline's stage
inline constexpr std::uint32_t kBindCompute = 1;
inline constexpr std::uint32_t kTimestamps = 2;
inline constexpr Flags kResults64 = 1;
inline constexpr Flags kResultsWait = 2;

}  // namespace flownpu::gpu::vk
