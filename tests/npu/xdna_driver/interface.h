// SPDX-License-Identifier: Apache-2.0
// The interface of the kernel's driver amdxdna to programs, as far as XRT's part for NPUs uses it:
// numbers, sizes and meanings as in Linux's include/uapi/drm/amdxdna_accel.h and drm.h. Requests
// are told apart by their number alone: newer headers append to their structures.
#pragma once

#include <cstdint>

namespace xdna_driver {

inline constexpr std::uint64_t kNoAddress = ~std::uint64_t{0};

// Numbers from this one to 0x9F are the driver's own; all others are common to DRM drivers.
inline constexpr unsigned int kOwn = 0x40;

enum class Request : unsigned int {
  kCreateContext = kOwn + 0,
  kDestroyContext = kOwn + 1,
  kConfigureContext = kOwn + 2,
  kCreateBuffer = kOwn + 3,
  kBufferInfo = kOwn + 4,
  kSyncBuffer = kOwn + 5,
  kExecute = kOwn + 6,
  kInfo = kOwn + 7,
  kWait = kOwn + 9,
  kGemClose = 0x09,
  kTimelineDestroy = 0xC0,
  kTimelineWait = 0xCA,
};

struct CreateContext {
  std::uint64_t ext, ext_flags, qos;
  std::uint32_t umq_bo, log_buf_bo, max_opc, num_tiles, mem_size, umq_doorbell;
  std::uint32_t handle;          // out
  std::uint32_t syncobj_handle;  // out: a timeline whose points are commands; 0: there is none
};

struct DestroyContext {
  std::uint32_t handle, pad;
};

// The configuration of an array: which buffer holds it.
struct ComputeUnit {
  std::uint32_t buffer;
  std::uint8_t function, pad[3];
};

struct ComputeUnits {
  std::uint16_t count, pad[3];
  ComputeUnit first;
};

struct ConfigureContext {
  std::uint32_t handle, type;  // 0: value is a ComputeUnits
  std::uint64_t value;
  std::uint32_t value_bytes, pad;
};

enum class BufferType : std::uint32_t { kShare = 1, kHeap = 2, kDevice = 3, kCommand = 4 };

struct CreateBuffer {
  std::uint64_t flags, vaddr, size;
  std::uint32_t type;    // BufferType
  std::uint32_t handle;  // out
};

struct BufferInfo {
  std::uint64_t ext, ext_flags;
  std::uint32_t handle, pad;
  std::uint64_t map_offset, vaddr, address;  // out
};

struct SyncBuffer {
  std::uint32_t handle, direction;  // 0: to the device
  std::uint64_t offset, size;
};

struct Execute {
  std::uint64_t ext, ext_flags;
  std::uint32_t context, type;  // 0: a command
  std::uint64_t commands;       // the command's buffer, if there is one
  std::uint64_t arguments;      // the buffers that it uses
  std::uint32_t command_count, argument_count;
  std::uint64_t sequence;  // out
};

struct Wait {
  std::uint32_t context, timeout;  // ms; 0: for ever
  std::uint64_t sequence;
};

// Closes a buffer or a timeline.
struct Close {
  std::uint32_t handle, pad;
};

struct TimelineWait {
  std::uint64_t handles, points;
  std::int64_t deadline;  // ns of the monotonic clock
  std::uint32_t count, flags, first_signaled, pad;
};

struct Info {
  std::uint32_t parameter;  // InfoParameter
  std::uint32_t bytes;
  std::uint64_t buffer;
};

enum class InfoParameter : std::uint32_t { kArray = 1, kArrayVersion = 2, kFirmware = 8 };

struct ArrayVersion {
  std::uint32_t major, minor;
};

struct TileInfo {
  std::uint16_t rows, first_row, dma_channels, locks, events, pad[3];
};

struct ArrayInfo {
  std::uint32_t column_bytes;
  std::uint16_t columns, rows;
  ArrayVersion version;
  TileInfo core, memory, shim;
};

struct FirmwareInfo {
  std::uint32_t major, minor, patch, build;
};

}  // namespace xdna_driver
