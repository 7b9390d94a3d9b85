// SPDX-License-Identifier: Apache-2.0
// The part of Vulkan 1.3's C interface that FlowNPU calls. It is declared here so that building and
// installing need nothing of Vulkan. Numbers and layouts are those of Khronos' registry (vk.xml); a
// test compares them with its headers where those can be had.
#pragma once

#include <cstddef>
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

// VkPhysicalDeviceLimits, of which the members between those named here are left out.
struct Limits {
  std::uint32_t images[6];
  std::uint32_t uniform_range;
  std::uint32_t storage_range;
  std::uint32_t push_constants;
  std::uint32_t allocations;
  std::uint32_t samplers;
  Size granularity[2];
  std::uint32_t graphics[38];
  std::uint32_t shared_memory;
  std::uint32_t group_count[3];
  std::uint32_t group_invocations;
  std::uint32_t group_size[3];
  std::uint32_t more_graphics[13];
  std::size_t map_alignment;
  Size alignments[3];
  std::uint32_t still_more_graphics[21];
  Bool has_timestamps;
  float timestamp_period;
  std::uint32_t rest[19];
};

struct Properties2 {
  Structure type = Structure::kPhysicalDeviceProperties2;
  void* next = nullptr;
  std::uint32_t api = 0;
  std::uint32_t driver = 0;
  std::uint32_t vendor = 0;
  std::uint32_t device = 0;
  Kind kind = Kind::kOther;
  char name[256] = {};
  std::uint8_t cache[16] = {};
  Limits limits = {};
  Bool sparse[5] = {};
};

struct DriverProperties {
  Structure type = Structure::kDriverProperties;
  void* next = nullptr;
  std::uint32_t id = 0;
  char name[256] = {};
  char info[256] = {};
  std::uint8_t conformance[4] = {};
};

struct Maintenance3Properties {
  Structure type = Structure::kMaintenance3Properties;
  void* next = nullptr;
  std::uint32_t descriptors = 0;
  Size allocation = 0;
};

// Structures of VK_AMD_shader_core_properties and VK_NV_shader_sm_builtins; drivers without these
// extensions ignore them.
struct AmdProperties {
  Structure type = Structure::kAmdProperties;
  void* next = nullptr;
  std::uint32_t engines = 0;
  std::uint32_t arrays = 0;  // of an engine
  std::uint32_t units = 0;   // of an array
  std::uint32_t rest[11] = {};
};

struct NvidiaProperties {
  Structure type = Structure::kNvidiaProperties;
  void* next = nullptr;
  std::uint32_t multiprocessors = 0;
  std::uint32_t warps = 0;
};

// The structures of VK_KHR_cooperative_matrix and VK_EXT_external_memory_host.
inline constexpr const char* kCooperativeMatrix = "VK_KHR_cooperative_matrix";
inline constexpr const char* kExternalMemoryHost = "VK_EXT_external_memory_host";

struct ExtensionProperties {
  char name[256] = {};
  std::uint32_t version = 0;
};

struct SubgroupProperties {
  Structure type = Structure::kSubgroupProperties;
  void* next = nullptr;
  std::uint32_t size = 0;
  Flags stages = 0;
  Flags operations = 0;
  Bool quads = 0;
};

struct ExternalMemoryHostProperties {
  Structure type = Structure::kExternalMemoryHostProperties;
  void* next = nullptr;
  Size alignment = 0;  // of pointers and sizes
};

struct CooperativeMatrixFeatures {
  Structure type = Structure::kCooperativeMatrixFeatures;
  void* next = nullptr;
  Bool has = 0;
  Bool robust = 0;
};

enum class Component : std::uint32_t { kFloat16, kFloat32 };
enum class Scope : std::uint32_t { kSubgroup = 3 };

// A product of a left matrix of m rows and k columns and a right one of k rows and n columns.
struct CooperativeMatrixProperties {
  Structure type = Structure::kCooperativeMatrixProperties;
  void* next = nullptr;
  std::uint32_t m = 0;
  std::uint32_t n = 0;
  std::uint32_t k = 0;
  Component left = {};
  Component right = {};
  Component added = {};
  Component result = {};
  Bool saturates = 0;
  Scope scope = Scope::kSubgroup;
};

struct QueueFamily {
  Flags flags;
  std::uint32_t count;
  std::uint32_t timestamp_bits;
  std::uint32_t granularity[3];
};

struct MemoryType {
  Flags flags;
  std::uint32_t heap;
};

struct MemoryHeap {
  Size bytes;
  Flags flags;
};

struct MemoryProperties {
  std::uint32_t type_count;
  MemoryType types[32];
  std::uint32_t heap_count;
  MemoryHeap heaps[16];
};

// Features are numbers of 0 or 1; those named here are indices into them.
struct Vulkan13Features {
  static constexpr std::size_t kSubgroupSizeControl = 7;
  static constexpr std::size_t kFullSubgroups = 8;
  static constexpr std::size_t kIntegerDotProduct = 13;
  Structure type = Structure::kVulkan13Features;
  void* next = nullptr;
  Bool has[15] = {};
};

struct Vulkan12Features {
  static constexpr std::size_t k8BitStorage = 2;
  static constexpr std::size_t kFloat16 = 7;
  static constexpr std::size_t kInt8 = 8;
  static constexpr std::size_t kBufferAddress = 38;
  static constexpr std::size_t kMemoryModel = 41;
  Structure type = Structure::kVulkan12Features;
  void* next = nullptr;
  Bool has[47] = {};
};

struct Vulkan11Features {
  static constexpr std::size_t k16BitStorage = 0;
  Structure type = Structure::kVulkan11Features;
  void* next = nullptr;
  Bool has[12] = {};
};

struct Features2 {
  static constexpr std::size_t kInt16 = 41;
  Structure type = Structure::kPhysicalDeviceFeatures2;
  void* next = nullptr;
  Bool has[55] = {};
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
