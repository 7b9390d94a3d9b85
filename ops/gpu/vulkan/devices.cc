// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/vulkan/devices.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "ops/gpu/language/text.h"
#include "ops/gpu/vulkan/loader.h"

namespace flownpu::gpu {
namespace {

// Compute units, where the driver names neither AMD's nor NVIDIA's.
constexpr std::int64_t kUnknownUnits = 16;

DeviceKind kind_of(vk::Kind kind) {
  if (kind == vk::Kind::kCpu) return DeviceKind::kCpu;
  return kind == vk::Kind::kOther ? DeviceKind::kOther : DeviceKind::kGpu;
}

std::string version_text(std::uint32_t version) {
  return text_of(version >> 22U, ".", (version >> 12U) & 0x3ffU, ".", version & 0xfffU);
}

std::string bytes_as_text(const std::uint8_t (&bytes)[16]) {
  std::string text;
  for (const std::uint8_t byte : bytes) text += text_of(static_cast<int>(byte), ".");
  return text;
}

std::string missing_features(vk::PhysicalDevice handle) {
  vk::Vulkan13Features of_13;
  vk::Vulkan12Features of_12{.next = &of_13};
  vk::Vulkan11Features of_11{.next = &of_12};
  vk::Features2 features{.next = &of_11};
  vulkan().vkGetPhysicalDeviceFeatures2(handle, &features);
  std::string missing;
  for (const auto& [has, name] :
       {std::pair(features.has[vk::Features2::kInt16], "shaderInt16"),
        {of_11.has[vk::Vulkan11Features::k16BitStorage], "storageBuffer16BitAccess"},
        {of_12.has[vk::Vulkan12Features::k8BitStorage], "storageBuffer8BitAccess"},
        {of_12.has[vk::Vulkan12Features::kFloat16], "shaderFloat16"},
        {of_12.has[vk::Vulkan12Features::kInt8], "shaderInt8"},
        {of_12.has[vk::Vulkan12Features::kBufferAddress], "bufferDeviceAddress"},
        {of_13.has[vk::Vulkan13Features::kIntegerDotProduct], "shaderIntegerDotProduct"}})
    if (has == 0) missing += (missing.empty() ? "" : ", ") + std::string(name);
  return missing;
}

bool has_extension(vk::PhysicalDevice handle, std::string_view wanted) {
  std::uint32_t count = 0;
  const auto list = [&](vk::ExtensionProperties* into) {
    const vk::Result result =
        vulkan().vkEnumerateDeviceExtensionProperties(handle, nullptr, &count, into);
    check_vulkan(result, "vkEnumerateDeviceExtensionProperties", "list of extensions");
  };
  list(nullptr);
  std::vector<vk::ExtensionProperties> found(count);
  list(found.data());
  return std::ranges::any_of(
      found, [&](const vk::ExtensionProperties& one) { return one.name == wanted; });
}

// Whether kernels may use cooperative matrices, and may require the size of subgroups.
bool has_matrix_features(vk::PhysicalDevice handle) {
  vk::CooperativeMatrixFeatures matrices;
  vk::Vulkan13Features of_13{.next = &matrices};
  vk::Vulkan12Features of_12{.next = &of_13};
  vk::Features2 features{.next = &of_12};
  vulkan().vkGetPhysicalDeviceFeatures2(handle, &features);
  return matrices.has != 0 && of_12.has[vk::Vulkan12Features::kMemoryModel] != 0 &&
         of_13.has[vk::Vulkan13Features::kSubgroupSizeControl] != 0 &&
         of_13.has[vk::Vulkan13Features::kFullSubgroups] != 0;
}

// The first product of float16 with sums of float32.
void set_matrices(VulkanDevice& found, std::uint32_t lanes) {
  const auto properties = vulkan().vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR;
  if (properties == nullptr || !has_extension(found.handle, vk::kCooperativeMatrix) ||
      !has_matrix_features(found.handle))
    return;
  std::uint32_t count = 0;
  const auto list = [&](vk::CooperativeMatrixProperties* into) {
    check_vulkan(properties(found.handle, &count, into),
                 "vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR", "list of matrices' sizes");
  };
  list(nullptr);
  std::vector<vk::CooperativeMatrixProperties> sizes(count);
  list(sizes.data());
  const auto one = std::ranges::find_if(sizes, [](const vk::CooperativeMatrixProperties& each) {
    return each.left == vk::Component::kFloat16 && each.right == vk::Component::kFloat16 &&
           each.added == vk::Component::kFloat32 && each.result == vk::Component::kFloat32 &&
           each.scope == vk::Scope::kSubgroup;
  });
  if (one != sizes.end())
    found.facts.matrices = {.rows = one->m, .columns = one->n, .depth = one->k, .lanes = lanes};
}

void set_queue(VulkanDevice& found) {
  std::uint32_t count = 0;
  vulkan().vkGetPhysicalDeviceQueueFamilyProperties(found.handle, &count, nullptr);
  std::vector<vk::QueueFamily> families(count);
  vulkan().vkGetPhysicalDeviceQueueFamilyProperties(found.handle, &count, families.data());
  const auto of = std::ranges::find_if(
      families, [](const vk::QueueFamily& one) { return (one.flags & vk::kComputeQueue) != 0; });
  if (of == families.end()) {
    found.missing = "a queue that computes";
    return;
  }
  found.queue_family = static_cast<std::uint32_t>(of - families.begin());
  if (of->timestamp_bits == 0) found.tick_ns = 0;
}

void set_memory(VulkanDevice& found) {
  vk::MemoryProperties memory{};
  vulkan().vkGetPhysicalDeviceMemoryProperties(found.handle, &memory);
  for (std::uint32_t i = 0; i < memory.heap_count; ++i)
    if ((memory.heaps[i].flags & vk::kDeviceLocal) != 0)
      found.facts.memory =
          std::max(found.facts.memory, static_cast<std::int64_t>(memory.heaps[i].bytes));
  found.facts.allocation = std::min(found.facts.allocation, found.facts.memory);
}

VulkanDevice device_of(vk::PhysicalDevice handle) {
  vk::SubgroupProperties subgroups;
  vk::ExternalMemoryHostProperties host{.next = &subgroups};
  vk::NvidiaProperties nvidia{.next = &host};
  vk::AmdProperties amd{.next = &nvidia};
  vk::Maintenance3Properties limits{.next = &amd};
  vk::DriverProperties driver{.next = &limits};
  vk::Properties2 properties{.next = &driver};
  vulkan().vkGetPhysicalDeviceProperties2(handle, &properties);
  VulkanDevice found;
  found.handle = handle;
  DeviceFacts& facts = found.facts;
  facts.platform = text_of("Vulkan, ", driver.name);
  facts.platform_version = version_text(properties.api);
  facts.name = properties.name;
  facts.vendor = text_of(properties.vendor);
  facts.driver = driver.info;
  facts.version = text_of("Vulkan ", version_text(properties.api));
  facts.kind = kind_of(properties.kind);
  const std::int64_t of_amd = std::int64_t{amd.engines} * amd.arrays * amd.units;
  facts.compute_units = facts.is_software()          ? std::thread::hardware_concurrency()
                        : of_amd > 0                 ? of_amd
                        : nvidia.multiprocessors > 0 ? nvidia.multiprocessors
                                                     : kUnknownUnits;
  facts.work_group = std::min(properties.limits.group_invocations, properties.limits.group_size[0]);
  facts.local_memory = properties.limits.shared_memory;
  facts.allocation = static_cast<std::int64_t>(limits.allocation);
  facts.unified_memory =
      properties.kind == vk::Kind::kIntegrated || properties.kind == vk::Kind::kCpu;
  facts.has_half = true;
  facts.has_integer_dot = true;
  std::ranges::copy(properties.limits.group_count, found.most_groups);
  found.tick_ns = static_cast<double>(properties.limits.timestamp_period);
  found.driver_key = text_of(properties.vendor, " ", properties.device, " ", properties.driver, " ",
                             bytes_as_text(properties.cache));
  if (properties.api < vk::kVersion13)
    found.missing = "Vulkan 1.3";
  else
    found.missing = missing_features(handle);
  set_queue(found);
  set_memory(found);
  if (!found.missing.empty()) return found;
  set_matrices(found, subgroups.size);
  if (facts.unified_memory && vulkan().vkGetMemoryHostPointerPropertiesEXT != nullptr &&
      has_extension(handle, vk::kExternalMemoryHost))
    found.host_alignment = host.alignment;
  facts.reads_host_memory = found.host_alignment > 0;
  return found;
}

}  // namespace

std::vector<VulkanDevice> vulkan_devices() {
  std::uint32_t count = 0;
  const auto list = [&](vk::PhysicalDevice* into) {
    check_vulkan(vulkan().vkEnumeratePhysicalDevices(vulkan().instance, &count, into),
                 "vkEnumeratePhysicalDevices", "list of Vulkan devices");
  };
  list(nullptr);
  std::vector<vk::PhysicalDevice> handles(count);
  list(handles.data());
  std::vector<VulkanDevice> found;
  found.reserve(handles.size());
  for (vk::PhysicalDevice handle : handles) found.push_back(device_of(handle));
  return found;
}

VulkanDevice choose_vulkan_device(const std::string& wanted) {
  const std::vector<VulkanDevice> found = vulkan_devices();
  std::string titles;
  for (const VulkanDevice& one : found)
    titles += text_of(titles.empty() ? "'" : ", '", one.facts.title(), "'",
                      one.missing.empty() ? "" : " (without " + one.missing + ")");
  auto chosen = std::ranges::find_if(found, [&](const VulkanDevice& one) {
    if (!one.missing.empty()) return false;
    return wanted.empty() ? one.facts.kind == DeviceKind::kGpu
                          : one.facts.title().find(wanted) != std::string::npos;
  });
  if (chosen == found.end() && wanted.empty())
    chosen =
        std::ranges::find_if(found, [](const VulkanDevice& one) { return one.missing.empty(); });
  if (chosen != found.end()) return *chosen;
  throw GpuError(Failure::kNoDevice,
                 text_of("[FlowNPU] device 'gpu': expected a device of Vulkan 1.3 with '", wanted,
                         "' in its name, got ", titles.empty() ? "none" : titles,
                         ": install a driver (Debian: mesa-vulkan-drivers), or use gpu_api = "
                         "opencl"));
}

}  // namespace flownpu::gpu
