// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/opencl/devices.h"

#include <algorithm>
#include <string_view>

#include "ops/gpu/opencl/loader.h"
#include "ops/gpu/opencl/status.h"

namespace flownpu::gpu {
namespace {

// Errors: of the loader if it finds no implementation at all, and of a platform without devices.
constexpr cl::Int kPlatformNotFound = -1001;
constexpr cl::Int kDeviceNotFound = -1;

// A string of any length from clGetPlatformInfo or clGetDeviceInfo, without trailing spaces.
template <typename Handle>
std::string text(cl::Int (*get)(Handle, cl::UInt, std::size_t, void*, std::size_t*), Handle handle,
                 cl::UInt what, const char* call) {
  std::size_t bytes = 0;
  check(get(handle, what, 0, nullptr, &bytes), call, "facts of an OpenCL device");
  std::string found(bytes, '\0');
  check(get(handle, what, bytes, found.data(), nullptr), call, "facts of an OpenCL device");
  while (!found.empty() && (found.back() == '\0' || found.back() == ' ')) found.pop_back();
  return found;
}

std::string text(cl::DeviceId id, cl::UInt what) {
  return text(opencl().clGetDeviceInfo, id, what, "clGetDeviceInfo");
}

// A number, `Number` being the type in which OpenCL gives it.
template <typename Number>
std::int64_t number(cl::DeviceId id, cl::UInt what) {
  Number value{};
  check(opencl().clGetDeviceInfo(id, what, sizeof(value), &value, nullptr), "clGetDeviceInfo",
        "facts of an OpenCL device");
  return static_cast<std::int64_t>(value);
}

std::vector<cl::Platform> platform_handles() {
  cl::UInt count = 0;
  const cl::Int code = opencl().clGetPlatformIDs(0, nullptr, &count);
  if (code == kPlatformNotFound || (code == 0 && count == 0)) return {};
  check(code, "clGetPlatformIDs", "list of OpenCL platforms");
  std::vector<cl::Platform> found(count);
  check(opencl().clGetPlatformIDs(count, found.data(), nullptr), "clGetPlatformIDs",
        "list of OpenCL platforms");
  return found;
}

std::string platform_text(cl::Platform platform, cl::UInt what) {
  return text(opencl().clGetPlatformInfo, platform, what, "clGetPlatformInfo");
}

DeviceKind kind_of(std::int64_t type) {
  if ((static_cast<cl::Bits>(type) & cl::kTypeGpu) != 0) return DeviceKind::kGpu;
  if ((static_cast<cl::Bits>(type) & cl::kTypeCpu) != 0) return DeviceKind::kCpu;
  return DeviceKind::kOther;
}

// The words between spaces, so that no extension is found as a part of a longer name.
std::string between_spaces(std::string_view words) {
  std::string text(1, ' ');
  return text.append(words).append(1, ' ');
}

DeviceFacts facts_of(cl::Platform platform, cl::DeviceId id) {
  const std::string extensions = between_spaces(text(id, cl::kDeviceExtensions));
  const auto has = [&](std::string_view extension) {
    return extensions.find(between_spaces(extension)) != std::string::npos;
  };
  DeviceFacts facts;
  facts.platform = platform_text(platform, cl::kPlatformName);
  facts.platform_version = platform_text(platform, cl::kPlatformVersion);
  facts.name = text(id, cl::kDeviceName);
  facts.vendor = text(id, cl::kDeviceVendor);
  facts.driver = text(id, cl::kDriverVersion);
  facts.version = text(id, cl::kDeviceVersion);
  facts.kind = kind_of(number<cl::Bits>(id, cl::kDeviceType));
  facts.compute_units = number<cl::UInt>(id, cl::kDeviceComputeUnits);
  facts.work_group = number<std::size_t>(id, cl::kDeviceWorkGroupSize);
  facts.local_memory = number<cl::Bits>(id, cl::kDeviceLocalMemory);
  facts.memory = number<cl::Bits>(id, cl::kDeviceMemory);
  facts.allocation = number<cl::Bits>(id, cl::kDeviceAllocation);
  facts.unified_memory = number<cl::UInt>(id, cl::kDeviceUnifiedMemory) != 0;
  facts.reads_host_memory = facts.is_software();
  facts.has_images = number<cl::UInt>(id, cl::kDeviceImages) != 0;
  if (facts.has_images) facts.texels = number<std::size_t>(id, cl::kDeviceTexels);
  facts.has_half = has("cl_khr_fp16");
  facts.has_integer_dot = has("cl_khr_integer_dot_product");
  facts.has_subgroups = has("cl_khr_subgroups") || has("cl_intel_subgroups");
  return facts;
}

}  // namespace

std::vector<std::string> platforms() {
  std::vector<std::string> names;
  for (cl::Platform platform : platform_handles())
    names.push_back(platform_text(platform, cl::kPlatformName));
  return names;
}

std::vector<FoundDevice> devices() {
  std::vector<FoundDevice> found;
  for (cl::Platform platform : platform_handles()) {
    cl::UInt count = 0;
    const cl::Int code = opencl().clGetDeviceIDs(platform, cl::kEveryType, 0, nullptr, &count);
    if (code == kDeviceNotFound || (code == 0 && count == 0)) continue;
    check(code, "clGetDeviceIDs", "list of OpenCL devices");
    std::vector<cl::DeviceId> ids(count);
    check(opencl().clGetDeviceIDs(platform, cl::kEveryType, count, ids.data(), nullptr),
          "clGetDeviceIDs", "list of OpenCL devices");
    for (cl::DeviceId id : ids) {
      const bool usable = number<cl::UInt>(id, cl::kDeviceAvailable) != 0 &&
                          number<cl::UInt>(id, cl::kDeviceCompiler) != 0;
      if (usable) found.push_back({platform, id, facts_of(platform, id)});
    }
  }
  return found;
}

FoundDevice choose_device(const std::string& wanted) {
  const std::vector<FoundDevice> found = devices();
  if (found.empty()) {
    const std::vector<std::string> names = platforms();
    if (names.empty()) check(kPlatformNotFound, "clGetPlatformIDs", "choice of an OpenCL device");
    check(kDeviceNotFound, "clGetDeviceIDs", "choice of an OpenCL device of " + names.front());
  }
  const auto chosen = std::ranges::find_if(found, [&](const FoundDevice& one) {
    return wanted.empty() ? one.facts.kind == DeviceKind::kGpu
                          : one.facts.title().find(wanted) != std::string::npos;
  });
  if (chosen != found.end()) return *chosen;
  if (wanted.empty()) return found.front();
  std::string titles;
  for (const FoundDevice& one : found)
    titles.append(titles.empty() ? "'" : ", '").append(one.facts.title()).append("'");
  throw GpuError(Failure::kNoDevice,
                 "[FlowNPU] device 'gpu': expected opencl_device to be a "
                 "part of one of " +
                     titles + ", got '" + wanted + "'");
}

}  // namespace flownpu::gpu
