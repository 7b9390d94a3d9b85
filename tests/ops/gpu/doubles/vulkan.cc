// SPDX-License-Identifier: Apache-2.0
// A double of Vulkan's loader: the functions of the loader that VULKAN_DOUBLE_OF names, unless a
// fault is injected; and devices that lack something. FLOWNPU_VULKAN names the double;
// tests/loader_double.py steers it.
#include <dlfcn.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <type_traits>

#include "ops/gpu/vulkan/abi.h"
#include "tests/ops/gpu/doubles/faults.h"

using namespace flownpu::gpu::vk;  // NOLINT(google-build-using-namespace): the interface's types

namespace vulkan_double {
namespace {

using loader_double::Faults;
using loader_double::faults;
using loader_double::Way;

using Find = void (*(*)(Instance, const char*))();

// The name of what the devices are said to be or lack.
std::string& pretended() {
  static std::string what;
  return what;
}

Functions& real() {
  static Functions functions;
  return functions;
}

Find loader() {
  static const Find find = [] {
    const char* file = std::getenv("VULKAN_DOUBLE_OF");
    void* library = file == nullptr ? nullptr : dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      std::fprintf(stderr,
                   "the double of Vulkan's loader: expected VULKAN_DOUBLE_OF to name one\n");
      std::abort();
    }
    return reinterpret_cast<Find>(dlsym(library, "vkGetInstanceProcAddr"));
  }();
  return find;
}

// Changes what a call found out, as is pretended. `discrete`: a GPU with memory that the host does
// not see, and a second type of memory for it.
template <typename... Arguments>
void pretend(const std::string& /*call*/, Arguments... /*arguments*/) {}

void pretend(const std::string& /*call*/, PhysicalDevice /*device*/, Properties2* properties) {
  if (pretended() == "discrete") properties->kind = Kind::kDiscrete;
  if (pretended() == "Vulkan 1.2") properties->api = 0x00402000;
  if (pretended() == "another driver") ++properties->driver;
}

void pretend(const std::string& /*call*/, PhysicalDevice /*device*/, Features2* features) {
  if (pretended() == "no shaderInt16") features->has[Features2::kInt16] = 0;
}

void pretend(const std::string& /*call*/, PhysicalDevice /*device*/, MemoryProperties* memory) {
  if (pretended() != "discrete") return;
  memory->type_count = 2;
  memory->types[1] = {kHostVisible | kHostCoherent | kHostCached, memory->types[0].heap};
  memory->types[0].flags = kDeviceLocal;
}

void pretend(const std::string& /*call*/, Device /*device*/, Handle /*buffer*/,
             MemoryRequirements* needed) {
  if (pretended() == "discrete") needed->types = 3;
}

// Not pretended: counts arguments of kernels that are not aligned as addresses have to be.
void pretend(const std::string& /*call*/, CommandBuffer /*commands*/, Handle /*layout*/,
             Flags /*stages*/, std::uint32_t /*offset*/, std::uint32_t /*bytes*/,
             const void* values) {
  std::uint64_t address = 0;
  std::memcpy(&address, values, sizeof(address));
  if (address % sizeof(address) != 0) faults().meet("misaligned");
}

void pretend(const std::string& /*call*/, Instance /*instance*/, std::uint32_t* count,
             PhysicalDevice* /*devices*/) {
  if (pretended() == "no device") *count = 0;
}

// Both types of a pretended discrete GPU are the real first.
template <typename Argument>
Argument given(Argument argument) {
  return argument;
}
const MemoryAllocateInfo* given(const MemoryAllocateInfo* info) {
  static thread_local MemoryAllocateInfo changed;
  changed = *info;
  if (pretended() == "discrete") changed.memory_type = 0;
  return &changed;
}

template <auto Member>
struct Double;

template <typename Made, typename... Arguments, Made (*Functions::*Member)(Arguments...)>
struct Double<Member> {
  static inline std::string name;

  static Made call(Arguments... arguments) {
    const Faults::Fate fate = faults().meet(name);
    if constexpr (std::is_same_v<Made, Result>) {
      if (fate.way == Way::kHung) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        return name == "vkWaitForFences" ? kTimeout : kSuccess;
      }
      if (fate.way != Way::kNone) return fate.code;
      const Result result = (real().*Member)(given(arguments)...);
      pretend(name, arguments...);
      return result;
    } else if constexpr (std::is_void_v<Made>) {
      (real().*Member)(arguments...);
      pretend(name, arguments...);
    } else {
      return (real().*Member)(arguments...);
    }
  }
};

}  // namespace
}  // namespace vulkan_double

#pragma GCC visibility push(default)
extern "C" {

void (*vkGetInstanceProcAddr(Instance instance, const char* name))() {
  void (*found)() = vulkan_double::loader()(instance, name);
  if (found == nullptr) return nullptr;
#define DOUBLE(result, function, parameters)                                                 \
  if (std::strcmp(name, #function) == 0) {                                                   \
    vulkan_double::real().function =                                                         \
        reinterpret_cast<decltype(vulkan_double::real().function)>(found);                   \
    vulkan_double::Double<&Functions::function>::name = name;                                \
    return reinterpret_cast<void (*)()>(&vulkan_double::Double<&Functions::function>::call); \
  }
  FLOWNPU_VULKAN_GLOBAL_FUNCTIONS(DOUBLE)
  FLOWNPU_VULKAN_FUNCTIONS(DOUBLE)
  FLOWNPU_VULKAN_EXTENSION_FUNCTIONS(DOUBLE)
#undef DOUBLE
  return found;
}

// --- How tests steer it.
void vulkan_double_inject(const char* call, std::int64_t nth, std::int32_t way, Result code) {
  loader_double::faults().inject(call, nth, static_cast<loader_double::Way>(way), code);
}
void vulkan_double_reset() {
  loader_double::faults().reset();
  vulkan_double::pretended().clear();
}
std::int64_t vulkan_double_calls(const char* call) { return loader_double::faults().calls(call); }
std::int64_t vulkan_double_endless_waits() { return loader_double::faults().endless_waits(); }
void vulkan_double_pretend(const char* what) { vulkan_double::pretended() = what; }

}  // extern "C"
#pragma GCC visibility pop
