// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/vulkan/memory.h"

#include <array>
#include <bit>
#include <initializer_list>
#include <utility>

#include "ops/gpu/vulkan/loader.h"

namespace flownpu::gpu {

OpenedDevice::OpenedDevice(const VulkanDevice& device)
    : is_unified_(device.facts.unified_memory), host_alignment_(device.host_alignment) {
  vk::Vulkan13Features of_13;
  of_13.has[vk::Vulkan13Features::kIntegerDotProduct] = 1;
  vk::Vulkan12Features of_12{.next = &of_13};
  of_12.has[vk::Vulkan12Features::k8BitStorage] = 1;
  of_12.has[vk::Vulkan12Features::kFloat16] = 1;
  of_12.has[vk::Vulkan12Features::kInt8] = 1;
  of_12.has[vk::Vulkan12Features::kBufferAddress] = 1;
  vk::Vulkan11Features of_11{.next = &of_12};
  of_11.has[vk::Vulkan11Features::k16BitStorage] = 1;
  vk::Features2 features{.next = &of_11};
  features.has[vk::Features2::kInt16] = 1;
  const float priority = 1;
  const vk::DeviceQueueCreateInfo queue{.family = device.queue_family, .priorities = &priority};
  std::vector<const char*> extensions;
  const vk::CooperativeMatrixFeatures matrices{.has = 1};
  if (device.facts.matrices) {
    extensions.push_back(vk::kCooperativeMatrix);
    of_13.next = const_cast<vk::CooperativeMatrixFeatures*>(&matrices);
    of_13.has[vk::Vulkan13Features::kSubgroupSizeControl] = 1;
    of_13.has[vk::Vulkan13Features::kFullSubgroups] = 1;
    of_12.has[vk::Vulkan12Features::kMemoryModel] = 1;
  }
  if (host_alignment_ > 0) extensions.push_back(vk::kExternalMemoryHost);
  const vk::DeviceCreateInfo info{.next = &features,
                                  .queue = &queue,
                                  .extensions = static_cast<std::uint32_t>(extensions.size()),
                                  .extension_names = extensions.data()};
  check_vulkan(vulkan().vkCreateDevice(device.handle, &info, nullptr, &handle_), "vkCreateDevice",
               "opening " + device.facts.title());
  vulkan().vkGetDeviceQueue(handle_, device.queue_family, 0, &queue_);
  vulkan().vkGetPhysicalDeviceMemoryProperties(device.handle, &memory_);
}

OpenedDevice::~OpenedDevice() {
  if (vulkan_is_parents() || is_abandoned_) return;
  vulkan().vkDestroyDevice(handle_, nullptr);
}

// The first type with the most of what is wanted. A GPU with memory of its own gets kernels' memory
// there, whether or not the host sees it.
std::uint32_t OpenedDevice::type_of(std::uint32_t allowed, MemoryUse use) const {
  constexpr vk::Flags kSeen = vk::kHostVisible | vk::kHostCoherent;
  const std::initializer_list<vk::Flags> for_kernels{vk::kDeviceLocal | kSeen, vk::kDeviceLocal, 0};
  const std::initializer_list<vk::Flags> for_host{kSeen | vk::kHostCached, kSeen};
  const std::initializer_list<vk::Flags> elsewhere{vk::kDeviceLocal, 0};
  const auto& wanted = use == MemoryUse::kStaging ? for_host
                       : is_unified_              ? for_kernels
                                                  : elsewhere;
  for (const vk::Flags flags : wanted)
    for (std::uint32_t i = 0; i < memory_.type_count; ++i)
      if ((allowed & (1U << i)) != 0 && (memory_.types[i].flags & flags) == flags) return i;
  return static_cast<std::uint32_t>(std::countr_zero(allowed));
}

std::unique_ptr<OpenedDevice::Piece> OpenedDevice::allocate(std::size_t bytes, MemoryUse use,
                                                            const std::string& what) {
  auto piece = std::make_unique<Piece>();
  const vk::BufferCreateInfo info{.bytes = bytes};
  check_vulkan(vulkan().vkCreateBuffer(handle_, &info, nullptr, &piece->buffer), "vkCreateBuffer",
               what);
  try {
    vk::MemoryRequirements needed{};
    vulkan().vkGetBufferMemoryRequirements(handle_, piece->buffer, &needed);
    const vk::MemoryAllocateFlagsInfo flags;
    const vk::MemoryAllocateInfo allocation{
        .next = &flags, .bytes = needed.bytes, .memory_type = type_of(needed.types, use)};
    check_vulkan(vulkan().vkAllocateMemory(handle_, &allocation, nullptr, &piece->memory),
                 "vkAllocateMemory", what);
    check_vulkan(vulkan().vkBindBufferMemory(handle_, piece->buffer, piece->memory, 0),
                 "vkBindBufferMemory", what);
    const vk::Flags type = memory_.types[allocation.memory_type].flags;
    constexpr vk::Flags kSeen = vk::kHostVisible | vk::kHostCoherent;
    if ((type & kSeen) == kSeen) {
      void* mapped = nullptr;
      check_vulkan(vulkan().vkMapMemory(handle_, piece->memory, 0, vk::kWholeSize, 0, &mapped),
                   "vkMapMemory", what);
      piece->mapped = static_cast<std::byte*>(mapped);
      piece->is_cached = (type & vk::kHostCached) != 0;
    }
  } catch (const GpuError&) {
    destroy(*piece);
    throw;
  }
  const vk::BufferDeviceAddressInfo of{.buffer = piece->buffer};
  piece->address = vulkan().vkGetBufferDeviceAddress(handle_, &of);
  piece->device = shared_from_this();
  return piece;
}

// Whole pages, so that the buffer begins before the memory, which its address does not.
std::unique_ptr<OpenedDevice::Piece> OpenedDevice::import(std::span<const std::byte> memory) {
  const auto first = reinterpret_cast<std::uintptr_t>(memory.data());
  const std::uintptr_t begin = first / host_alignment_ * host_alignment_;
  const vk::Size bytes =
      (first + memory.size() - begin + host_alignment_ - 1) / host_alignment_ * host_alignment_;
  // The interface has no pointer to const; kernels only read.
  void* const pointer = reinterpret_cast<void*>(begin);  // NOLINT(performance-no-int-to-ptr)
  vk::MemoryHostPointerProperties properties;
  if (vulkan().vkGetMemoryHostPointerPropertiesEXT(handle_, vk::kHostAllocation, pointer,
                                                   &properties) != vk::kSuccess)
    return nullptr;
  auto piece = std::make_unique<Piece>();
  const vk::ExternalMemoryBufferCreateInfo external;
  const vk::BufferCreateInfo info{.next = &external, .bytes = bytes};
  if (vulkan().vkCreateBuffer(handle_, &info, nullptr, &piece->buffer) != vk::kSuccess)
    return nullptr;
  vk::MemoryRequirements needed{};
  vulkan().vkGetBufferMemoryRequirements(handle_, piece->buffer, &needed);
  const std::uint32_t types = needed.types & properties.types;
  const vk::ImportMemoryHostPointerInfo host{.pointer = pointer};
  const vk::MemoryAllocateFlagsInfo flags{.next = &host};
  const vk::MemoryAllocateInfo allocation{
      .next = &flags, .bytes = bytes, .memory_type = type_of(types, MemoryUse::kKernels)};
  if (types == 0 || needed.bytes > bytes ||
      vulkan().vkAllocateMemory(handle_, &allocation, nullptr, &piece->memory) != vk::kSuccess ||
      vulkan().vkBindBufferMemory(handle_, piece->buffer, piece->memory, 0) != vk::kSuccess) {
    destroy(*piece);
    return nullptr;
  }
  const vk::BufferDeviceAddressInfo of{.buffer = piece->buffer};
  piece->address = vulkan().vkGetBufferDeviceAddress(handle_, &of) + (first - begin);
  piece->device = shared_from_this();
  return piece;
}

// A handle of 0 is passed over. Freed memory is unmapped.
void OpenedDevice::destroy(const Piece& piece) const {
  ++destroyed_;
  vulkan().vkDestroyBuffer(handle_, piece.buffer, nullptr);
  vulkan().vkFreeMemory(handle_, piece.memory, nullptr);
}

void OpenedDevice::free(std::unique_ptr<Piece> piece) {
  const std::shared_ptr<OpenedDevice> self = std::exchange(piece->device, nullptr);
  if (vulkan_is_parents()) return;
  const std::lock_guard lock(mutex_);
  if (is_abandoned_) return;
  if (is_busy_)
    kept_.push_back(std::move(piece));
  else
    destroy(*piece);
}

void OpenedDevice::set_busy(bool is_busy) {
  const std::lock_guard lock(mutex_);
  is_busy_ = is_busy;
  if (is_busy || is_abandoned_) return;
  for (const std::unique_ptr<Piece>& piece : kept_) destroy(*piece);
  kept_.clear();
}

void OpenedDevice::abandon() {
  const std::lock_guard lock(mutex_);
  is_abandoned_ = true;
}

}  // namespace flownpu::gpu
