// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/open_context.h"

#include "ops/gpu/opencl/context.h"
#include "ops/gpu/vulkan/context.h"

namespace flownpu::gpu {

std::shared_ptr<Context> open_context(const DeviceOptions& options) {
  if (options.gpu_api == GpuApi::kVulkan)
    return std::make_shared<VulkanContext>(choose_vulkan_device(options.opencl_device));
  return std::make_shared<OpenClContext>(choose_device(options.opencl_device));
}

}  // namespace flownpu::gpu
