// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/open_context.h"

#include <optional>
#include <string>

#include "ops/gpu/opencl/context.h"
#include "ops/gpu/vulkan/context.h"

namespace flownpu::gpu {
namespace {

// A GPU of Vulkan that is not software; nothing if there is none.
std::optional<VulkanDevice> real_vulkan_device(const std::string& wanted) {
  try {
    VulkanDevice device = choose_vulkan_device(wanted);
    if (device.facts.kind == DeviceKind::kGpu) return device;
  } catch (const GpuError& error) {
    if (error.failure() == Failure::kForked || error.failure() == Failure::kCommand) throw;
  }
  return std::nullopt;
}

// OpenCL's if it is a GPU, as the one that has been tried; else a GPU of Vulkan; else what OpenCL
// has, or says that it lacks.
std::shared_ptr<Context> open_any(const std::string& wanted) {
  std::optional<FoundDevice> of_opencl;
  std::optional<GpuError> without;
  try {
    of_opencl = choose_device(wanted);
  } catch (const GpuError& error) {
    without = error;
  }
  if (of_opencl && (!wanted.empty() || of_opencl->facts.kind == DeviceKind::kGpu))
    return std::make_shared<OpenClContext>(std::move(*of_opencl));
  if (std::optional<VulkanDevice> other = real_vulkan_device(wanted))
    return std::make_shared<VulkanContext>(std::move(*other));
  if (without)
    throw GpuError(without->failure(),
                   std::string(without->what()) + "; there is no GPU of Vulkan either");
  return std::make_shared<OpenClContext>(std::move(*of_opencl));
}

}  // namespace

std::shared_ptr<Context> open_context(const DeviceOptions& options) {
  switch (options.gpu_api) {
    case GpuApi::kVulkan:
      return std::make_shared<VulkanContext>(choose_vulkan_device(options.opencl_device));
    case GpuApi::kOpenCl:
      return std::make_shared<OpenClContext>(choose_device(options.opencl_device));
    case GpuApi::kAuto:
      break;
  }
  return open_any(options.opencl_device);
}

}  // namespace flownpu::gpu
