// SPDX-License-Identifier: Apache-2.0
// The part of Vulkan 1.3's C interface that FlowNPU calls. It is declared here so that building and
// installing need nothing of Vulkan. Numbers and layouts are those of Khronos' registry (vk.xml); a
// test compares them with its headers where those can be had.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/gpu/vulkan/descriptions.h"
#include "ops/gpu/vulkan/numbers.h"

namespace flownpu::gpu::vk {

struct ApplicationInfo {
  Structure type = Structure::kApplicationInfo;
  const void* next = nullptr;
  const char* application = nullptr;
  std::uint32_t application_version = 0;
  const char* engine = nullptr;
  std::uint32_t engine_version = 0;
  std::uint32_t api = kVersion13;
};

struct InstanceCreateInfo {
  Structure type = Structure::kInstanceCreateInfo;
  const void* next = nullptr;
  Flags flags = 0;
  const ApplicationInfo* application = nullptr;
  std::uint32_t layers = 0;
  const char* const* layer_names = nullptr;
  std::uint32_t extensions = 0;
  const char* const* extension_names = nullptr;
};

struct DeviceQueueCreateInfo {
  Structure type = Structure::kDeviceQueueCreateInfo;
  const void* next = nullptr;
  Flags flags = 0;
  std::uint32_t family = 0;
  std::uint32_t count = 1;
  const float* priorities = nullptr;
};

struct DeviceCreateInfo {
  Structure type = Structure::kDeviceCreateInfo;
  const void* next = nullptr;
  Flags flags = 0;
  std::uint32_t queues = 1;
  const DeviceQueueCreateInfo* queue = nullptr;
  std::uint32_t layers = 0;
  const char* const* layer_names = nullptr;
  std::uint32_t extensions = 0;
  const char* const* extension_names = nullptr;
  const void* features = nullptr;
};

struct BufferCreateInfo {
  Structure type = Structure::kBufferCreateInfo;
  const void* next = nullptr;
  Flags flags = 0;
  Size bytes = 0;
  Flags usage = kTransferSource | kTransferTarget | kStorageBuffer | kDeviceAddress;
  std::uint32_t sharing = 0;
  std::uint32_t families = 0;
  const std::uint32_t* family_numbers = nullptr;
};

struct ExternalMemoryBufferCreateInfo {
  Structure type = Structure::kExternalMemoryBufferCreateInfo;
  const void* next = nullptr;
  Flags handles = kHostAllocation;
};

struct ImportMemoryHostPointerInfo {
  Structure type = Structure::kImportMemoryHostPointerInfo;
  const void* next = nullptr;
  Flags handle = kHostAllocation;
  void* pointer = nullptr;
};

struct MemoryHostPointerProperties {
  Structure type = Structure::kMemoryHostPointerProperties;
  void* next = nullptr;
  std::uint32_t types = 0;
};

struct MemoryRequirements {
  Size bytes;
  Size alignment;
  std::uint32_t types;
};

struct MemoryAllocateFlagsInfo {
  Structure type = Structure::kMemoryAllocateFlagsInfo;
  const void* next = nullptr;
  Flags flags = kAllocateDeviceAddress;
  std::uint32_t devices = 0;
};

struct MemoryAllocateInfo {
  Structure type = Structure::kMemoryAllocateInfo;
  const void* next = nullptr;
  Size bytes = 0;
  std::uint32_t memory_type = 0;
};

struct BufferDeviceAddressInfo {
  Structure type = Structure::kBufferDeviceAddressInfo;
  const void* next = nullptr;
  Handle buffer = 0;
};

struct ShaderModuleCreateInfo {
  Structure type = Structure::kShaderModuleCreateInfo;
  const void* next = nullptr;
  Flags flags = 0;
  std::size_t bytes = 0;
  const std::uint32_t* words = nullptr;
};

struct PushConstantRange {
  Flags stages = kComputeStage;
  std::uint32_t offset = 0;
  std::uint32_t bytes = 0;
};

struct PipelineLayoutCreateInfo {
  Structure type = Structure::kPipelineLayoutCreateInfo;
  const void* next = nullptr;
  Flags flags = 0;
  std::uint32_t layouts = 0;
  const Handle* set_layouts = nullptr;
  std::uint32_t ranges = 1;
  const PushConstantRange* range = nullptr;
};

struct PipelineCacheCreateInfo {
  Structure type = Structure::kPipelineCacheCreateInfo;
  const void* next = nullptr;
  Flags flags = 0;
  std::size_t bytes = 0;
  const void* data = nullptr;
};

struct PipelineShaderStageCreateInfo {
  Structure type = Structure::kPipelineShaderStageCreateInfo;
  const void* next = nullptr;
  Flags flags = 0;
  Flags stage = kComputeStage;
  Handle module = 0;
  const char* name = nullptr;
  const void* specialization = nullptr;
};

struct RequiredSubgroupSizeCreateInfo {
  Structure type = Structure::kRequiredSubgroupSizeCreateInfo;
  void* next = nullptr;
  std::uint32_t size = 0;
};

struct ComputePipelineCreateInfo {
  Structure type = Structure::kComputePipelineCreateInfo;
  const void* next = nullptr;
  Flags flags = 0;
  PipelineShaderStageCreateInfo stage;
  Handle layout = 0;
  Handle base = 0;
  std::int32_t base_index = -1;
};

struct CommandPoolCreateInfo {
  Structure type = Structure::kCommandPoolCreateInfo;
  const void* next = nullptr;
  Flags flags = kResettable;
  std::uint32_t family = 0;
};

struct CommandBufferAllocateInfo {
  Structure type = Structure::kCommandBufferAllocateInfo;
  const void* next = nullptr;
  Handle pool = 0;
  std::uint32_t level = 0;
  std::uint32_t count = 1;
};

struct CommandBufferBeginInfo {
  Structure type = Structure::kCommandBufferBeginInfo;
  const void* next = nullptr;
  Flags flags = 0;
  const void* inheritance = nullptr;
};

struct MemoryBarrier {
  Structure type = Structure::kMemoryBarrier;
  const void* next = nullptr;
  Flags from = 0;
  Flags to = 0;
};

struct BufferCopy {
  Size from = 0;
  Size to = 0;
  Size bytes = 0;

  bool operator==(const BufferCopy&) const = default;
};

struct QueryPoolCreateInfo {
  Structure type = Structure::kQueryPoolCreateInfo;
  const void* next = nullptr;
  Flags flags = 0;
  std::uint32_t queries = kTimestamps;
  std::uint32_t count = 0;
  Flags statistics = 0;
};

struct FenceCreateInfo {
  Structure type = Structure::kFenceCreateInfo;
  const void* next = nullptr;
  Flags flags = 0;
};

struct SubmitInfo {
  Structure type = Structure::kSubmitInfo;
  const void* next = nullptr;
  std::uint32_t waits = 0;
  const Handle* wait_semaphores = nullptr;
  const Flags* stages = nullptr;
  std::uint32_t count = 1;
  const CommandBuffer* commands = nullptr;
  std::uint32_t signals = 0;
  const Handle* signal_semaphores = nullptr;
};

// Functions before there is an instance, of an instance and of a device, and of extensions, which
// loaders may lack: X(result, name, parameters). The last parameter of those that make or destroy
// objects is an allocator, if it is a const void*.
#define FLOWNPU_VULKAN_GLOBAL_FUNCTIONS(X)                \
  X(Result, vkEnumerateInstanceVersion, (std::uint32_t*)) \
  X(Result, vkCreateInstance, (const InstanceCreateInfo*, const void*, Instance*))

#define FLOWNPU_VULKAN_FUNCTIONS(X)                                                                \
  X(Result, vkEnumeratePhysicalDevices, (Instance, std::uint32_t*, PhysicalDevice*))               \
  X(void, vkGetPhysicalDeviceProperties2, (PhysicalDevice, Properties2*))                          \
  X(void, vkGetPhysicalDeviceFeatures2, (PhysicalDevice, Features2*))                              \
  X(void, vkGetPhysicalDeviceMemoryProperties, (PhysicalDevice, MemoryProperties*))                \
  X(void, vkGetPhysicalDeviceQueueFamilyProperties,                                                \
    (PhysicalDevice, std::uint32_t*, QueueFamily*))                                                \
  X(Result, vkEnumerateDeviceExtensionProperties,                                                  \
    (PhysicalDevice, const char*, std::uint32_t*, ExtensionProperties*))                           \
  X(Result, vkCreateDevice, (PhysicalDevice, const DeviceCreateInfo*, const void*, Device*))       \
  X(void, vkDestroyDevice, (Device, const void*))                                                  \
  X(void, vkGetDeviceQueue, (Device, std::uint32_t, std::uint32_t, Queue*))                        \
  X(Result, vkDeviceWaitIdle, (Device))                                                            \
  X(Result, vkCreateBuffer, (Device, const BufferCreateInfo*, const void*, Handle*))               \
  X(void, vkDestroyBuffer, (Device, Handle, const void*))                                          \
  X(void, vkGetBufferMemoryRequirements, (Device, Handle, MemoryRequirements*))                    \
  X(Size, vkGetBufferDeviceAddress, (Device, const BufferDeviceAddressInfo*))                      \
  X(Result, vkAllocateMemory, (Device, const MemoryAllocateInfo*, const void*, Handle*))           \
  X(void, vkFreeMemory, (Device, Handle, const void*))                                             \
  X(Result, vkBindBufferMemory, (Device, Handle, Handle, Size))                                    \
  X(Result, vkMapMemory, (Device, Handle, Size, Size, Flags, void**))                              \
  X(Result, vkCreateShaderModule, (Device, const ShaderModuleCreateInfo*, const void*, Handle*))   \
  X(void, vkDestroyShaderModule, (Device, Handle, const void*))                                    \
  X(Result, vkCreatePipelineLayout,                                                                \
    (Device, const PipelineLayoutCreateInfo*, const void*, Handle*))                               \
  X(void, vkDestroyPipelineLayout, (Device, Handle, const void*))                                  \
  X(Result, vkCreatePipelineCache, (Device, const PipelineCacheCreateInfo*, const void*, Handle*)) \
  X(void, vkDestroyPipelineCache, (Device, Handle, const void*))                                   \
  X(Result, vkGetPipelineCacheData, (Device, Handle, std::size_t*, void*))                         \
  X(Result, vkCreateComputePipelines,                                                              \
    (Device, Handle, std::uint32_t, const ComputePipelineCreateInfo*, const void*, Handle*))       \
  X(void, vkDestroyPipeline, (Device, Handle, const void*))                                        \
  X(Result, vkCreateCommandPool, (Device, const CommandPoolCreateInfo*, const void*, Handle*))     \
  X(void, vkDestroyCommandPool, (Device, Handle, const void*))                                     \
  X(Result, vkAllocateCommandBuffers, (Device, const CommandBufferAllocateInfo*, CommandBuffer*))  \
  X(Result, vkBeginCommandBuffer, (CommandBuffer, const CommandBufferBeginInfo*))                  \
  X(Result, vkEndCommandBuffer, (CommandBuffer))                                                   \
  X(void, vkCmdBindPipeline, (CommandBuffer, std::uint32_t, Handle))                               \
  X(void, vkCmdPushConstants,                                                                      \
    (CommandBuffer, Handle, Flags, std::uint32_t, std::uint32_t, const void*))                     \
  X(void, vkCmdDispatch, (CommandBuffer, std::uint32_t, std::uint32_t, std::uint32_t))             \
  X(void, vkCmdPipelineBarrier,                                                                    \
    (CommandBuffer, Flags, Flags, Flags, std::uint32_t, const MemoryBarrier*, std::uint32_t,       \
     const void*, std::uint32_t, const void*))                                                     \
  X(void, vkCmdCopyBuffer, (CommandBuffer, Handle, Handle, std::uint32_t, const BufferCopy*))      \
  X(void, vkCmdResetQueryPool, (CommandBuffer, Handle, std::uint32_t, std::uint32_t))              \
  X(void, vkCmdWriteTimestamp, (CommandBuffer, Flags, Handle, std::uint32_t))                      \
  X(Result, vkCreateQueryPool, (Device, const QueryPoolCreateInfo*, const void*, Handle*))         \
  X(void, vkDestroyQueryPool, (Device, Handle, const void*))                                       \
  X(Result, vkGetQueryPoolResults,                                                                 \
    (Device, Handle, std::uint32_t, std::uint32_t, std::size_t, void*, Size, Flags))               \
  X(Result, vkQueueSubmit, (Queue, std::uint32_t, const SubmitInfo*, Handle))                      \
  X(Result, vkCreateFence, (Device, const FenceCreateInfo*, const void*, Handle*))                 \
  X(void, vkDestroyFence, (Device, Handle, const void*))                                           \
  X(Result, vkWaitForFences, (Device, std::uint32_t, const Handle*, Bool, Size))                   \
  X(Result, vkResetFences, (Device, std::uint32_t, const Handle*))

#define FLOWNPU_VULKAN_EXTENSION_FUNCTIONS(X)                       \
  X(Result, vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR,      \
    (PhysicalDevice, std::uint32_t*, CooperativeMatrixProperties*)) \
  X(Result, vkGetMemoryHostPointerPropertiesEXT,                    \
    (Device, Flags, const void*, MemoryHostPointerProperties*))

// Pointers to these functions, null for those of extensions that the loader lacks, once there is an
// instance (vulkan/loader.h).
struct Functions {
  Instance instance = nullptr;
  // NOLINTNEXTLINE(bugprone-macro-parentheses): these are parts of a declaration.
#define FLOWNPU_VULKAN_POINTER(result, name, parameters) result(*name) parameters = nullptr;
  FLOWNPU_VULKAN_GLOBAL_FUNCTIONS(FLOWNPU_VULKAN_POINTER)
  FLOWNPU_VULKAN_FUNCTIONS(FLOWNPU_VULKAN_POINTER)
  FLOWNPU_VULKAN_EXTENSION_FUNCTIONS(FLOWNPU_VULKAN_POINTER)
#undef FLOWNPU_VULKAN_POINTER
};

}  // namespace flownpu::gpu::vk
