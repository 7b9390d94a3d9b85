// SPDX-License-Identifier: Apache-2.0
// Runtime: the NPU path's interface to an array and its driver. XRT drives a real one
// (xrt_runtime.cc); elsewhere the emulator stands in for it (emulated_runtime.cc).
//
// The words of a call are what the host sends for it: the emulator's flat sequence, or the
// instructions of the NPU's controller, one 32-bit word in each.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <sstream>
#include <string>
#include <string_view>

#include "ops/error.h"

namespace flownpu::npu {

// The kind of a DeviceError, for callers that treat kinds differently.
enum class Failure : std::uint8_t {
  kNoDevice,    // no device file, or the driver is not there
  kPermission,  // the device file or locked memory is refused
  kVersion,     // driver, firmware or XRT is too old
  kArtifact,    // a compiled design is missing, damaged, or for another array
  kMemory,      // a buffer was not to be had
  kSubmit,      // the call was not accepted
  kCommand,     // the call ended with an error
  kTimeout,     // the call did not end in time
  kForked,      // the process was forked since the device was opened
};

class DeviceError : public DeviceFailed {
 public:
  DeviceError(Failure failure, const std::string& message)
      : DeviceFailed(message), failure_(failure) {}
  Failure failure() const { return failure_; }

 private:
  Failure failure_;
};

// Throws DeviceError with the pieces joined to one message, after "[FlowNPU] ".
template <typename... Pieces>
[[noreturn]] void fail_device(Failure failure, const Pieces&... pieces) {
  std::ostringstream text;
  ((text << "[FlowNPU] ") << ... << pieces);
  throw DeviceError(failure, text.str());
}

// Memory that both the host and the array reach. Each side sees the other's writes after a move
// (`to_device`, `to_host`). Offsets and sizes are in bytes. A move of 0 bytes does nothing; a range
// beyond the buffer throws Error.
class Buffer {
 public:
  virtual ~Buffer() = default;
  virtual std::span<std::byte> bytes() = 0;
  virtual void to_device(std::size_t offset, std::size_t bytes) = 0;
  virtual void to_host(std::size_t offset, std::size_t bytes) = 0;
};

// Addresses of DMA transfers are multiples of this, in bytes.
inline constexpr std::size_t kDmaWord = 4;

// A part of a buffer, as an argument of a call.
struct View {
  Buffer* buffer = nullptr;
  std::size_t offset = 0;
  std::size_t bytes = 0;
  bool constant = false;  // no array writes it
};

// The words of a call, in memory that the device reads. A word may be changed between dispatches.
class Sequence {
 public:
  virtual ~Sequence() = default;
  virtual void write(std::size_t word, std::int64_t value) = 0;
};

// An array that is configured: an xclbin in a hardware context of its own, or an emulator.
class Array {
 public:
  virtual ~Array() = default;
  // Throws DeviceError (kArtifact) if the words are not for this array.
  virtual std::unique_ptr<Sequence> sequence(std::span<const std::int64_t> words) = 0;
  // The most buffers that a call of this array may have.
  virtual std::size_t most_buffers() const { return std::numeric_limits<std::size_t>::max(); }
};

struct Call {
  // For messages: "decode_layer layers 0-5".
  std::string name;
  Sequence* sequence = nullptr;
  std::span<const View> arguments;
  // For profiles: the file of its family, and its position.
  std::string_view family = {};
  std::int64_t position = 0;
};

// Counts since the runtime was opened, of dispatches that were accepted. Bytes are those of
// to_device and to_host; the words of calls are counted separately.
template <typename Number>
struct CountsOf {
  Number dispatches = 0;
  Number calls = 0;
  Number bytes_to_device = 0;
  Number bytes_to_host = 0;
  Number word_bytes = 0;
  Number buffer_bytes = 0;  // allocated now
};
using Counts = CountsOf<std::uint64_t>;

// Shared by all objects of a runtime, which may outlive it and go on counting.
struct Counters : CountsOf<std::atomic<std::uint64_t>> {
  Counts read() const {
    return {dispatches, calls, bytes_to_device, bytes_to_host, word_bytes, buffer_bytes};
  }
};

class Runtime {
 public:
  virtual ~Runtime() = default;

  // For the placement line: "npu2, emulated", "NPU Strix, firmware 255.0.5.35, XRT 2.25".
  virtual std::string description() const = 0;
  // `file`: what the artifacts' index names for an array. Throws DeviceError (kArtifact).
  virtual std::shared_ptr<Array> load(const std::string& file) = 0;
  // A buffer of zeros that begins at a multiple of 4096. Throws DeviceError (kMemory).
  virtual std::unique_ptr<Buffer> allocate(std::size_t bytes) = 0;
  // Calls over one array, one after the other in one dispatch. Each call sees the results of
  // earlier ones. Returns when they have ended. Throws DeviceError that names the call, after which
  // the array is in an unknown state and must not be run again: kSubmit, kCommand, kNoDevice, or
  // kTimeout if they have not ended within `limit`. Even then their memory stays allocated: run()
  // waits until the driver ends the calls, and keeps a call that never ends with all its memory.
  virtual void run(Array& array, std::span<const Call> calls, std::chrono::milliseconds limit) = 0;
  virtual Counts counts() const = 0;
};

}  // namespace flownpu::npu
