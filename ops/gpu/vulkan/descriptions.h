// SPDX-License-Identifier: Apache-2.0
// The structures by which a driver of Vulkan describes a device: limits, properties, memory and
// features (abi.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/gpu/vulkan/numbers.h"

namespace flownpu::gpu::vk {

// VkPhysicalDeviceLimits, of which the members between those named here are left out.
struct Limits {
  std::uint32_t images[6];
  std::uint32_t uniform_range;
  std::uint32_t storage_range;
  std::uint32_t push_constants;
  std::uint32_t allocations;
  std::uint32_t samplers;
  Size granularity[2];
  std::uint32_t graphics[38];
  std::uint32_t shared_memory;
  std::uint32_t group_count[3];
  std::uint32_t group_invocations;
  std::uint32_t group_size[3];
  std::uint32_t more_graphics[13];
  std::size_t map_alignment;
  Size alignments[3];
  std::uint32_t still_more_graphics[21];
  Bool has_timestamps;
  float timestamp_period;
  std::uint32_t rest[19];
};

struct Properties2 {
  Structure type = Structure::kPhysicalDeviceProperties2;
  void* next = nullptr;
  std::uint32_t api = 0;
  std::uint32_t driver = 0;
  std::uint32_t vendor = 0;
  std::uint32_t device = 0;
  Kind kind = Kind::kOther;
  char name[256] = {};
  std::uint8_t cache[16] = {};
  Limits limits = {};
  Bool sparse[5] = {};
};

struct DriverProperties {
  Structure type = Structure::kDriverProperties;
  void* next = nullptr;
  std::uint32_t id = 0;
  char name[256] = {};
  char info[256] = {};
  std::uint8_t conformance[4] = {};
};

struct Maintenance3Properties {
  Structure type = Structure::kMaintenance3Properties;
  void* next = nullptr;
  std::uint32_t descriptors = 0;
  Size allocation = 0;
};

// Structures of VK_AMD_shader_core_properties and VK_NV_shader_sm_builtins; drivers without these
// extensions ignore them.
struct AmdProperties {
  Structure type = Structure::kAmdProperties;
  void* next = nullptr;
  std::uint32_t engines = 0;
  std::uint32_t arrays = 0;  // of an engine
  std::uint32_t units = 0;   // of an array
  std::uint32_t rest[11] = {};
};

struct NvidiaProperties {
  Structure type = Structure::kNvidiaProperties;
  void* next = nullptr;
  std::uint32_t multiprocessors = 0;
  std::uint32_t warps = 0;
};

// The structures of VK_KHR_cooperative_matrix and VK_EXT_external_memory_host.
inline constexpr const char* kCooperativeMatrix = "VK_KHR_cooperative_matrix";
inline constexpr const char* kExternalMemoryHost = "VK_EXT_external_memory_host";

struct ExtensionProperties {
  char name[256] = {};
  std::uint32_t version = 0;
};

struct SubgroupProperties {
  Structure type = Structure::kSubgroupProperties;
  void* next = nullptr;
  std::uint32_t size = 0;
  Flags stages = 0;
  Flags operations = 0;
  Bool quads = 0;
};

struct ExternalMemoryHostProperties {
  Structure type = Structure::kExternalMemoryHostProperties;
  void* next = nullptr;
  Size alignment = 0;  // of pointers and sizes
};

struct CooperativeMatrixFeatures {
  Structure type = Structure::kCooperativeMatrixFeatures;
  void* next = nullptr;
  Bool has = 0;
  Bool robust = 0;
};

enum class Component : std::uint32_t { kFloat16, kFloat32 };
enum class Scope : std::uint32_t { kSubgroup = 3 };

// A product of a left matrix of m rows and k columns and a right one of k rows and n columns.
struct CooperativeMatrixProperties {
  Structure type = Structure::kCooperativeMatrixProperties;
  void* next = nullptr;
  std::uint32_t m = 0;
  std::uint32_t n = 0;
  std::uint32_t k = 0;
  Component left = {};
  Component right = {};
  Component added = {};
  Component result = {};
  Bool saturates = 0;
  Scope scope = Scope::kSubgroup;
};

struct QueueFamily {
  Flags flags;
  std::uint32_t count;
  std::uint32_t timestamp_bits;
  std::uint32_t granularity[3];
};

struct MemoryType {
  Flags flags;
  std::uint32_t heap;
};

struct MemoryHeap {
  Size bytes;
  Flags flags;
};

struct MemoryProperties {
  std::uint32_t type_count;
  MemoryType types[32];
  std::uint32_t heap_count;
  MemoryHeap heaps[16];
};

// Features are numbers of 0 or 1; those named here are indices into them.
struct Vulkan13Features {
  static constexpr std::size_t kSubgroupSizeControl = 7;
  static constexpr std::size_t kFullSubgroups = 8;
  static constexpr std::size_t kIntegerDotProduct = 13;
  Structure type = Structure::kVulkan13Features;
  void* next = nullptr;
  Bool has[15] = {};
};

struct Vulkan12Features {
  static constexpr std::size_t k8BitStorage = 2;
  static constexpr std::size_t kFloat16 = 7;
  static constexpr std::size_t kInt8 = 8;
  static constexpr std::size_t kBufferAddress = 38;
  static constexpr std::size_t kMemoryModel = 41;
  Structure type = Structure::kVulkan12Features;
  void* next = nullptr;
  Bool has[47] = {};
};

struct Vulkan11Features {
  static constexpr std::size_t k16BitStorage = 0;
  Structure type = Structure::kVulkan11Features;
  void* next = nullptr;
  Bool has[12] = {};
};

struct Features2 {
  static constexpr std::size_t kInt16 = 41;
  Structure type = Structure::kPhysicalDeviceFeatures2;
  void* next = nullptr;
  Bool has[55] = {};
};

}  // namespace flownpu::gpu::vk
