// SPDX-License-Identifier: Apache-2.0
// Compiled, not run: compares ops/gpu/vulkan/abi.h with Vulkan's own headers.
#define VK_NO_PROTOTYPES
#include <vulkan/vulkan_core.h>

#include <cstddef>

#include "ops/gpu/vulkan/abi.h"

namespace vk = flownpu::gpu::vk;

#define SAME_SIZE(ours, theirs) static_assert(sizeof(vk::ours) == sizeof(theirs))
#define SAME_PLACE(ours, member, theirs, its) \
  static_assert(offsetof(vk::ours, member) == offsetof(theirs, its))
#define SAME_FEATURE(ours, index, theirs, its)                                  \
  static_assert(offsetof(vk::ours, has) + sizeof(vk::Bool) * vk::ours::index == \
                offsetof(theirs, its))
#define SAME_NUMBER(ours, theirs) \
  static_assert(static_cast<long long>(vk::ours) == static_cast<long long>(theirs))

SAME_SIZE(ApplicationInfo, VkApplicationInfo);
SAME_SIZE(InstanceCreateInfo, VkInstanceCreateInfo);
SAME_SIZE(Limits, VkPhysicalDeviceLimits);
SAME_SIZE(Properties2, VkPhysicalDeviceProperties2);
SAME_SIZE(DriverProperties, VkPhysicalDeviceDriverProperties);
SAME_SIZE(QueueFamily, VkQueueFamilyProperties);
SAME_SIZE(MemoryProperties, VkPhysicalDeviceMemoryProperties);
SAME_SIZE(Vulkan13Features, VkPhysicalDeviceVulkan13Features);
SAME_SIZE(Vulkan12Features, VkPhysicalDeviceVulkan12Features);
SAME_SIZE(Vulkan11Features, VkPhysicalDeviceVulkan11Features);
SAME_SIZE(Features2, VkPhysicalDeviceFeatures2);
SAME_SIZE(DeviceQueueCreateInfo, VkDeviceQueueCreateInfo);
SAME_SIZE(DeviceCreateInfo, VkDeviceCreateInfo);
SAME_SIZE(BufferCreateInfo, VkBufferCreateInfo);
SAME_SIZE(MemoryRequirements, VkMemoryRequirements);
SAME_SIZE(MemoryAllocateFlagsInfo, VkMemoryAllocateFlagsInfo);
SAME_SIZE(MemoryAllocateInfo, VkMemoryAllocateInfo);
SAME_SIZE(BufferDeviceAddressInfo, VkBufferDeviceAddressInfo);
SAME_SIZE(ShaderModuleCreateInfo, VkShaderModuleCreateInfo);
SAME_SIZE(PushConstantRange, VkPushConstantRange);
SAME_SIZE(PipelineLayoutCreateInfo, VkPipelineLayoutCreateInfo);
SAME_SIZE(PipelineCacheCreateInfo, VkPipelineCacheCreateInfo);
SAME_SIZE(PipelineShaderStageCreateInfo, VkPipelineShaderStageCreateInfo);
SAME_SIZE(ComputePipelineCreateInfo, VkComputePipelineCreateInfo);
SAME_SIZE(CommandPoolCreateInfo, VkCommandPoolCreateInfo);
SAME_SIZE(CommandBufferAllocateInfo, VkCommandBufferAllocateInfo);
SAME_SIZE(CommandBufferBeginInfo, VkCommandBufferBeginInfo);
SAME_SIZE(MemoryBarrier, VkMemoryBarrier);
SAME_SIZE(BufferCopy, VkBufferCopy);
SAME_SIZE(QueryPoolCreateInfo, VkQueryPoolCreateInfo);
SAME_SIZE(FenceCreateInfo, VkFenceCreateInfo);
SAME_SIZE(SubmitInfo, VkSubmitInfo);
SAME_SIZE(Maintenance3Properties, VkPhysicalDeviceMaintenance3Properties);
SAME_SIZE(AmdProperties, VkPhysicalDeviceShaderCorePropertiesAMD);
SAME_SIZE(NvidiaProperties, VkPhysicalDeviceShaderSMBuiltinsPropertiesNV);

SAME_SIZE(ExtensionProperties, VkExtensionProperties);
SAME_SIZE(SubgroupProperties, VkPhysicalDeviceSubgroupProperties);
SAME_SIZE(ExternalMemoryHostProperties, VkPhysicalDeviceExternalMemoryHostPropertiesEXT);
SAME_SIZE(ExternalMemoryBufferCreateInfo, VkExternalMemoryBufferCreateInfo);
SAME_SIZE(ImportMemoryHostPointerInfo, VkImportMemoryHostPointerInfoEXT);
SAME_SIZE(MemoryHostPointerProperties, VkMemoryHostPointerPropertiesEXT);
SAME_SIZE(RequiredSubgroupSizeCreateInfo, VkPipelineShaderStageRequiredSubgroupSizeCreateInfo);

SAME_PLACE(Properties2, limits, VkPhysicalDeviceProperties2, properties.limits);
SAME_PLACE(Properties2, name, VkPhysicalDeviceProperties2, properties.deviceName);
SAME_PLACE(Limits, shared_memory, VkPhysicalDeviceLimits, maxComputeSharedMemorySize);
SAME_PLACE(Limits, group_invocations, VkPhysicalDeviceLimits, maxComputeWorkGroupInvocations);
SAME_PLACE(Limits, group_count, VkPhysicalDeviceLimits, maxComputeWorkGroupCount);
SAME_PLACE(Limits, timestamp_period, VkPhysicalDeviceLimits, timestampPeriod);
SAME_PLACE(Limits, has_timestamps, VkPhysicalDeviceLimits, timestampComputeAndGraphics);
SAME_PLACE(Limits, push_constants, VkPhysicalDeviceLimits, maxPushConstantsSize);
SAME_PLACE(Limits, map_alignment, VkPhysicalDeviceLimits, minMemoryMapAlignment);
SAME_PLACE(MemoryProperties, heaps, VkPhysicalDeviceMemoryProperties, memoryHeaps);

SAME_FEATURE(Vulkan13Features, kIntegerDotProduct, VkPhysicalDeviceVulkan13Features,
             shaderIntegerDotProduct);
SAME_FEATURE(Vulkan13Features, kSubgroupSizeControl, VkPhysicalDeviceVulkan13Features,
             subgroupSizeControl);
SAME_FEATURE(Vulkan13Features, kFullSubgroups, VkPhysicalDeviceVulkan13Features,
             computeFullSubgroups);
SAME_FEATURE(Vulkan12Features, kMemoryModel, VkPhysicalDeviceVulkan12Features, vulkanMemoryModel);
SAME_FEATURE(Vulkan12Features, k8BitStorage, VkPhysicalDeviceVulkan12Features,
             storageBuffer8BitAccess);
SAME_FEATURE(Vulkan12Features, kFloat16, VkPhysicalDeviceVulkan12Features, shaderFloat16);
SAME_FEATURE(Vulkan12Features, kInt8, VkPhysicalDeviceVulkan12Features, shaderInt8);
SAME_FEATURE(Vulkan12Features, kBufferAddress, VkPhysicalDeviceVulkan12Features,
             bufferDeviceAddress);
SAME_FEATURE(Vulkan11Features, k16BitStorage, VkPhysicalDeviceVulkan11Features,
             storageBuffer16BitAccess);
SAME_FEATURE(Features2, kInt16, VkPhysicalDeviceFeatures2, features.shaderInt16);

SAME_NUMBER(Structure::kApplicationInfo, VK_STRUCTURE_TYPE_APPLICATION_INFO);
SAME_NUMBER(Structure::kInstanceCreateInfo, VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO);
SAME_NUMBER(Structure::kDeviceQueueCreateInfo, VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO);
SAME_NUMBER(Structure::kDeviceCreateInfo, VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO);
SAME_NUMBER(Structure::kSubmitInfo, VK_STRUCTURE_TYPE_SUBMIT_INFO);
SAME_NUMBER(Structure::kMemoryAllocateInfo, VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO);
SAME_NUMBER(Structure::kFenceCreateInfo, VK_STRUCTURE_TYPE_FENCE_CREATE_INFO);
SAME_NUMBER(Structure::kQueryPoolCreateInfo, VK_STRUCTURE_TYPE_QUERY_POOL_CREATE_INFO);
SAME_NUMBER(Structure::kBufferCreateInfo, VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO);
SAME_NUMBER(Structure::kShaderModuleCreateInfo, VK_STRUCTURE_TYPE_SHADER_MODULE_CREATE_INFO);
SAME_NUMBER(Structure::kPipelineCacheCreateInfo, VK_STRUCTURE_TYPE_PIPELINE_CACHE_CREATE_INFO);
SAME_NUMBER(Structure::kPipelineShaderStageCreateInfo,
            VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO);
SAME_NUMBER(Structure::kComputePipelineCreateInfo, VK_STRUCTURE_TYPE_COMPUTE_PIPELINE_CREATE_INFO);
SAME_NUMBER(Structure::kPipelineLayoutCreateInfo, VK_STRUCTURE_TYPE_PIPELINE_LAYOUT_CREATE_INFO);
SAME_NUMBER(Structure::kCommandPoolCreateInfo, VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO);
SAME_NUMBER(Structure::kCommandBufferAllocateInfo, VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO);
SAME_NUMBER(Structure::kCommandBufferBeginInfo, VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO);
SAME_NUMBER(Structure::kMemoryBarrier, VK_STRUCTURE_TYPE_MEMORY_BARRIER);
SAME_NUMBER(Structure::kVulkan11Features, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_FEATURES);
SAME_NUMBER(Structure::kVulkan12Features, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES);
SAME_NUMBER(Structure::kVulkan13Features, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_3_FEATURES);
SAME_NUMBER(Structure::kPhysicalDeviceFeatures2, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2);
SAME_NUMBER(Structure::kPhysicalDeviceProperties2, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2);
SAME_NUMBER(Structure::kMemoryAllocateFlagsInfo, VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_FLAGS_INFO);
SAME_NUMBER(Structure::kDriverProperties, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_DRIVER_PROPERTIES);
SAME_NUMBER(Structure::kBufferDeviceAddressInfo, VK_STRUCTURE_TYPE_BUFFER_DEVICE_ADDRESS_INFO);
SAME_NUMBER(Kind::kIntegrated, VK_PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU);
SAME_NUMBER(Kind::kDiscrete, VK_PHYSICAL_DEVICE_TYPE_DISCRETE_GPU);
SAME_NUMBER(Kind::kVirtual, VK_PHYSICAL_DEVICE_TYPE_VIRTUAL_GPU);
SAME_NUMBER(Kind::kCpu, VK_PHYSICAL_DEVICE_TYPE_CPU);
SAME_NUMBER(kComputeQueue, VK_QUEUE_COMPUTE_BIT);
SAME_NUMBER(kDeviceLocal, VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT);
SAME_NUMBER(kHostVisible, VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT);
SAME_NUMBER(kHostCoherent, VK_MEMORY_PROPERTY_HOST_COHERENT_BIT);
SAME_NUMBER(kHostCached, VK_MEMORY_PROPERTY_HOST_CACHED_BIT);
SAME_NUMBER(kTransferSource, VK_BUFFER_USAGE_TRANSFER_SRC_BIT);
SAME_NUMBER(kTransferTarget, VK_BUFFER_USAGE_TRANSFER_DST_BIT);
SAME_NUMBER(kStorageBuffer, VK_BUFFER_USAGE_STORAGE_BUFFER_BIT);
SAME_NUMBER(kDeviceAddress, VK_BUFFER_USAGE_SHADER_DEVICE_ADDRESS_BIT);
SAME_NUMBER(kAllocateDeviceAddress, VK_MEMORY_ALLOCATE_DEVICE_ADDRESS_BIT);
SAME_NUMBER(kComputeShaderStage, VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT);
SAME_NUMBER(kTransferStage, VK_PIPELINE_STAGE_TRANSFER_BIT);
SAME_NUMBER(kHostStage, VK_PIPELINE_STAGE_HOST_BIT);
SAME_NUMBER(kBottomOfPipe, VK_PIPELINE_STAGE_BOTTOM_OF_PIPE_BIT);
SAME_NUMBER(kShaderRead, VK_ACCESS_SHADER_READ_BIT);
SAME_NUMBER(kShaderWrite, VK_ACCESS_SHADER_WRITE_BIT);
SAME_NUMBER(kTransferRead, VK_ACCESS_TRANSFER_READ_BIT);
SAME_NUMBER(kTransferWrite, VK_ACCESS_TRANSFER_WRITE_BIT);
SAME_NUMBER(kHostRead, VK_ACCESS_HOST_READ_BIT);
SAME_NUMBER(kHostWrite, VK_ACCESS_HOST_WRITE_BIT);
SAME_NUMBER(kComputeStage, VK_SHADER_STAGE_COMPUTE_BIT);
SAME_NUMBER(kResettable, VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT);
SAME_NUMBER(kBindCompute, VK_PIPELINE_BIND_POINT_COMPUTE);
SAME_NUMBER(kTimestamps, VK_QUERY_TYPE_TIMESTAMP);
SAME_NUMBER(kResults64, VK_QUERY_RESULT_64_BIT);
SAME_NUMBER(kResultsWait, VK_QUERY_RESULT_WAIT_BIT);
SAME_NUMBER(kHostAllocation, VK_EXTERNAL_MEMORY_HANDLE_TYPE_HOST_ALLOCATION_BIT_EXT);
SAME_NUMBER(kFullSubgroups, VK_PIPELINE_SHADER_STAGE_CREATE_REQUIRE_FULL_SUBGROUPS_BIT);
SAME_NUMBER(kIncomplete, VK_INCOMPLETE);
SAME_NUMBER(Structure::kExternalMemoryBufferCreateInfo,
            VK_STRUCTURE_TYPE_EXTERNAL_MEMORY_BUFFER_CREATE_INFO);
SAME_NUMBER(Structure::kSubgroupProperties, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_PROPERTIES);
SAME_NUMBER(Structure::kImportMemoryHostPointerInfo,
            VK_STRUCTURE_TYPE_IMPORT_MEMORY_HOST_POINTER_INFO_EXT);
SAME_NUMBER(Structure::kMemoryHostPointerProperties,
            VK_STRUCTURE_TYPE_MEMORY_HOST_POINTER_PROPERTIES_EXT);
SAME_NUMBER(Structure::kExternalMemoryHostProperties,
            VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_EXTERNAL_MEMORY_HOST_PROPERTIES_EXT);
SAME_NUMBER(Structure::kRequiredSubgroupSizeCreateInfo,
            VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_REQUIRED_SUBGROUP_SIZE_CREATE_INFO);
#ifdef VK_KHR_cooperative_matrix  // newer than Debian 12's headers
SAME_SIZE(CooperativeMatrixFeatures, VkPhysicalDeviceCooperativeMatrixFeaturesKHR);
SAME_SIZE(CooperativeMatrixProperties, VkCooperativeMatrixPropertiesKHR);
SAME_NUMBER(Structure::kCooperativeMatrixFeatures,
            VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_COOPERATIVE_MATRIX_FEATURES_KHR);
SAME_NUMBER(Structure::kCooperativeMatrixProperties,
            VK_STRUCTURE_TYPE_COOPERATIVE_MATRIX_PROPERTIES_KHR);
SAME_NUMBER(Component::kFloat16, VK_COMPONENT_TYPE_FLOAT16_KHR);
SAME_NUMBER(Component::kFloat32, VK_COMPONENT_TYPE_FLOAT32_KHR);
SAME_NUMBER(Scope::kSubgroup, VK_SCOPE_SUBGROUP_KHR);
#endif
SAME_NUMBER(kVersion13, VK_API_VERSION_1_3);
SAME_NUMBER(kTimeout, VK_TIMEOUT);
SAME_NUMBER(Structure::kNvidiaProperties,
            VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_SM_BUILTINS_PROPERTIES_NV);
SAME_NUMBER(Structure::kMaintenance3Properties,
            VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MAINTENANCE_3_PROPERTIES);
SAME_NUMBER(Structure::kAmdProperties,
            VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_CORE_PROPERTIES_AMD);
