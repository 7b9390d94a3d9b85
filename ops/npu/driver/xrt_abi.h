// SPDX-License-Identifier: Apache-2.0
// The C interface between libflownpu_ep.so (xrt_runtime.cc) and the plugin libflownpu_xrt.so
// (xrt/).
//
// Only the plugin is linked to XRT, so that everything else runs without XRT. The two libraries
// have separate C++ run times (the EP brings one, XRT uses the system's), so the interface has only
// C types and no exceptions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flownpu::npu::xrt_abi {

inline constexpr std::uint32_t kVersion = 4;

enum class Status : std::int32_t {
  kOk,
  kNoDevice,      // XRT finds no NPU, or lost it
  kNotStarted,    // XRT finds no NPU, though its driver is loaded
  kPermission,    // the device file is not for this user
  kLockedMemory,  // the driver may not lock as much memory as it needs
  kTooOld,        // XRT, the driver below it, or the NPU's firmware
  kIncomplete,    // a part of XRT is not installed
  kDesign,        // the file is no xclbin that this NPU takes, or the words are not for it
  kContexts,      // no room on the NPU for another context
  kMemory,        // no memory for a buffer
  kSubmit,        // the call was not accepted
  kCommand,       // the call ended with an error
  kTimeout,       // the call did not end in time, or the driver's watchdog ended it
};

struct Device;
struct Array;
struct Sequence;
struct Buffer;

// Where a function writes a message: at most `capacity` bytes, with a zero at the end.
struct Text {
  char* data;
  std::size_t capacity;
};

struct View {
  Buffer* buffer;
  std::size_t offset;
  std::size_t bytes;
};

struct Call {
  Sequence* sequence;
  const View* arguments;
  std::size_t count;
};

// The outcome of a dispatch.
struct Outcome {
  bool accepted;           // whether all its calls were, however they ended
  std::size_t word_bytes;  // bytes of instructions moved to the device for it
  std::size_t failed;      // index of the call, if XRT knows it; else unchanged
};

enum class Direction : std::int32_t { kToDevice, kToHost };

// All functions may be called from any thread. One object is used by one thread at a time, except
// devices and arrays. A function's result is freed with the matching `free_`. A device or an array
// may be freed before objects made from it. If a function does not return kOk, it made nothing, and
// `error` says why.
struct Table {
  std::uint32_t version;

  // `description`: "NPU Strix, firmware 255.0.5.35, XRT 2.25".
  Status (*open_device)(Device** device, Text description, Text error);
  void (*free_device)(Device* device);

  // Loads an xclbin, in a hardware context of its own. `most_buffers`: how many a call of it may
  // have.
  Status (*load_array)(Device* device, const char* file, Array** array, std::size_t* most_buffers,
                       Text error);
  void (*free_array)(Array* array);

  // Instructions of the NPU's controller. No word may be written while a call of it is under way.
  Status (*make_sequence)(Array* array, const std::uint32_t* words, std::size_t count,
                          Sequence** sequence, Text error);
  Status (*write_word)(Sequence* sequence, std::size_t word, std::uint32_t value, Text error);
  void (*free_sequence)(Sequence* sequence);

  // Begins as zeros, for host and device; `host`: its address on the host, page-aligned.
  Status (*make_buffer)(Device* device, std::size_t bytes, Buffer** buffer, void** host,
                        Text error);
  Status (*move)(Buffer* buffer, Direction direction, std::size_t offset, std::size_t bytes,
                 Text error);
  void (*free_buffer)(Buffer* buffer);

  // Runs one dispatch. kTimeout if the calls have not ended after `milliseconds`. Then, and after
  // kNoDevice, it waits until the driver's watchdog has ended them; calls that the watchdog never
  // ends are kept, with all they use.
  Status (*run)(Array* array, const Call* calls, std::size_t count, std::uint32_t milliseconds,
                Outcome* outcome, Text error);
};

// The one symbol the plugin exports.
using GetTable = const Table* (*)();
inline constexpr const char* kGetTable = "flownpu_xrt_table";

}  // namespace flownpu::npu::xrt_abi
