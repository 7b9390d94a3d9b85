// SPDX-License-Identifier: Apache-2.0
// Finds Vulkan when the process first asks for it: the loader, which finds drivers.
#pragma once

#include <string>
#include <string_view>

#include "ops/gpu/context/failure.h"
#include "ops/gpu/vulkan/abi.h"

namespace flownpu::gpu {

// Environment variable: the loader's file, for systems whose linker does not find it.
inline constexpr const char* kVulkanVariable = "FLOWNPU_VULKAN";

// The loader's functions, with an instance of Vulkan 1.3. Both stay for the process's life. Throws
// GpuError (kNoLoader, kNoPlatform for a loader without a driver of 1.3, kForked: loaded_api.h).
const vk::Functions& vulkan();

bool vulkan_is_parents();
void check_vulkan_is_own();

// Throws GpuError unless the result is VK_SUCCESS. `call`: the function's name; `what`: what it was
// for.
void check_vulkan(vk::Result result, std::string_view call, std::string_view what);

}  // namespace flownpu::gpu
