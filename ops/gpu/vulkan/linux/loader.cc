// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/vulkan/loader.h"

#include <dlfcn.h>

#include <cstdlib>

namespace flownpu::gpu {
namespace {

std::string last_error() {
  const char* error = dlerror();
  return error == nullptr ? "no reason given" : error;
}

}  // namespace

FindFunction load_vulkan() {
  const char* given = std::getenv(kVulkanVariable);
  void* library = dlopen(given == nullptr ? "libvulkan.so.1" : given, RTLD_NOW | RTLD_LOCAL);
  void* symbol = library == nullptr ? nullptr : dlsym(library, "vkGetInstanceProcAddr");
  if (symbol != nullptr) return reinterpret_cast<FindFunction>(symbol);
  throw GpuError(Failure::kNoLoader,
                 "[FlowNPU] device 'gpu': expected Vulkan's loader (" + last_error() +
                     "); install it (Debian: libvulkan1 and mesa-vulkan-drivers), set " +
                     kVulkanVariable + " to the file of one, or use gpu_api = opencl");
}

}  // namespace flownpu::gpu
