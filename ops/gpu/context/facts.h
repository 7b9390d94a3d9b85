// SPDX-License-Identifier: Apache-2.0
// Properties of a device on which kernels and their callers depend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "ops/error.h"
#include "ops/gpu/language/kernel.h"

namespace flownpu::gpu {

enum class DeviceKind : std::uint8_t { kGpu, kCpu, kOther };

struct DeviceFacts {
  // Bytes of a texel of an image of memory: four uint32.
  static constexpr std::size_t kTexelBytes = 16;

  std::string platform;
  std::string platform_version;
  std::string name;
  std::string vendor;
  std::string driver;
  std::string version;
  DeviceKind kind = DeviceKind::kOther;
  std::int64_t compute_units = 0;
  // The most work-items of a work-group.
  std::int64_t work_group = 0;
  // Bytes: of a work-group's own memory, of all memory, of the largest buffer.
  std::int64_t local_memory = 0;
  std::int64_t memory = 0;
  std::int64_t allocation = 0;
  bool unified_memory = false;
  // Whether kernels read the host's memory in place (Context::use).
  bool reads_host_memory = false;
  bool has_images = false;
  // The most texels of an image of memory; 0 without images.
  std::int64_t texels = 0;
  // As extensions say: arithmetic in half precision, dot products of four 8-bit integers,
  // subgroups.
  bool has_half = false;
  bool has_integer_dot = false;
  bool has_subgroups = false;
  std::optional<MatrixUnits> matrices = std::nullopt;

  // A CPU that computes the numbers of a GPU, but slowly.
  bool is_software() const { return kind == DeviceKind::kCpu; }
  // Whether an image holds a buffer of so many bytes.
  bool can_be_image(std::size_t bytes) const {
    return bytes % kTexelBytes == 0 && static_cast<std::int64_t>(bytes / kTexelBytes) <= texels;
  }
  // "pthread-... (Portable Computing Language)".
  std::string title() const { return name + " (" + platform + ")"; }
  // Throws std::runtime_error if the device has none.
  const MatrixUnits& matrix_units() const {
    if (!matrices) fail("expected a device with matrix units, got ", title());
    return *matrices;
  }
  // A warning for the user; empty if there is none.
  std::string warning() const {
    if (!is_software()) return "";
    return title() +
           " is a CPU that computes what a GPU would: it is there to test, and slower than "
           "device = cpu";
  }
};

}  // namespace flownpu::gpu
