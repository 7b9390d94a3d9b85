// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/vulkan/loader.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "ops/gpu/context/loaded_api.h"
#include "ops/system/library.h"

namespace flownpu::gpu {
namespace {

constexpr vk::Result kOutOfHostMemory = -1;
constexpr vk::Result kOutOfDeviceMemory = -2;
constexpr vk::Result kIncompatibleDriver = -9;

constexpr std::pair<vk::Result, const char*> kResults[] = {
    {kOutOfHostMemory, "VK_ERROR_OUT_OF_HOST_MEMORY"},
    {kOutOfDeviceMemory, "VK_ERROR_OUT_OF_DEVICE_MEMORY"},
    {-3, "VK_ERROR_INITIALIZATION_FAILED"},
    {-4, "VK_ERROR_DEVICE_LOST"},
    {-5, "VK_ERROR_MEMORY_MAP_FAILED"},
    {-7, "VK_ERROR_EXTENSION_NOT_PRESENT"},
    {-8, "VK_ERROR_FEATURE_NOT_PRESENT"},
    {kIncompatibleDriver, "VK_ERROR_INCOMPATIBLE_DRIVER"},
    {-10, "VK_ERROR_TOO_MANY_OBJECTS"},
    {-13, "VK_ERROR_UNKNOWN"},
};

std::pair<Failure, const char*> meaning_of(vk::Result result) {
  if (result == kOutOfHostMemory || result == kOutOfDeviceMemory)
    return {Failure::kMemory, "use smaller inputs, or close other programs that use the GPU"};
  if (result == kIncompatibleDriver)
    return {Failure::kNoPlatform,
            "no driver of Vulkan is installed: install one (Debian: mesa-vulkan-drivers), or use "
            "gpu_api = opencl"};
  return {Failure::kCommand,
          "see `sudo dmesg`, update the driver, or use gpu_api = opencl or device = cpu"};
}

// The function by which all others are found.
using FindFunction = void (*(*)(vk::Instance, const char*))();
FindFunction open_loader() {
  const char* given = std::getenv(kVulkanVariable);
  std::string reasons;
  void* library = given == nullptr ? open_library({"libvulkan.so.1", "vulkan-1.dll"}, reasons)
                                   : open_library({given}, reasons);
  void* symbol = library == nullptr ? nullptr : find_symbol(library, "vkGetInstanceProcAddr");
  if (symbol != nullptr) return reinterpret_cast<FindFunction>(symbol);
  throw GpuError(Failure::kNoLoader,
                 "[FlowNPU] device 'gpu': expected Vulkan's loader (" + reasons +
                     "); install it (Debian: libvulkan1 and mesa-vulkan-drivers; Windows: the "
                     "GPU's driver), set " +
                     kVulkanVariable + " to the file of one, or use gpu_api = opencl");
}

vk::Functions load() {
  const FindFunction find = open_loader();
  vk::Functions functions;
  const auto found = [&](const char* name) {
    void (*function)() = find(functions.instance, name);
    if (function == nullptr)
      throw GpuError(Failure::kNoLoader, std::string("[FlowNPU] device 'gpu': expected Vulkan 1.3, "
                                                     "and its loader has no ") +
                                             name + "; update it, or use gpu_api = opencl");
    return function;
  };
#define FLOWNPU_VULKAN_LOAD(result, name, parameters) \
  functions.name = reinterpret_cast<decltype(functions.name)>(found(#name));
  FLOWNPU_VULKAN_GLOBAL_FUNCTIONS(FLOWNPU_VULKAN_LOAD)
  const vk::ApplicationInfo application;
  const vk::InstanceCreateInfo info{.application = &application};
  check_vulkan(functions.vkCreateInstance(&info, nullptr, &functions.instance), "vkCreateInstance",
               "loading Vulkan");
  FLOWNPU_VULKAN_FUNCTIONS(FLOWNPU_VULKAN_LOAD)
#undef FLOWNPU_VULKAN_LOAD
#define FLOWNPU_VULKAN_LOAD(result, name, parameters) \
  functions.name = reinterpret_cast<decltype(functions.name)>(find(functions.instance, #name));
  FLOWNPU_VULKAN_EXTENSION_FUNCTIONS(FLOWNPU_VULKAN_LOAD)
#undef FLOWNPU_VULKAN_LOAD
  return functions;
}

LoadedApi<vk::Functions>& loaded() {
  static LoadedApi<vk::Functions> api(load);
  return api;
}

}  // namespace

void check_vulkan(vk::Result result, std::string_view call, std::string_view what) {
  if (result == vk::kSuccess) return;
  const auto* found =
      std::ranges::find(kResults, result, &std::pair<vk::Result, const char*>::first);
  const std::string name = found == std::end(kResults) ? "VkResult" : found->second;
  const auto [failure, advice] = meaning_of(result);
  throw GpuError(failure, "[FlowNPU] device 'gpu': " + std::string(what) + ": " +
                              std::string(call) + " ended with " + name + " (" +
                              std::to_string(result) + "); " + advice);
}

bool vulkan_is_parents() { return loaded().is_parents(); }
void check_vulkan_is_own() { loaded().check_own(); }
const vk::Functions& vulkan() { return loaded().functions(); }

}  // namespace flownpu::gpu
