// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/vulkan/loader.h"

namespace flownpu::gpu {

FindFunction load_vulkan() {
  throw GpuError(Failure::kNoLoader,
                 "[FlowNPU] device 'gpu': expected Linux, got Windows, where FlowNPU does not load "
                 "Vulkan yet; use device = cpu");
}

}  // namespace flownpu::gpu
