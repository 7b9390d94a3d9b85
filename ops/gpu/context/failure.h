// SPDX-License-Identifier: Apache-2.0
// The error of a device that does not do what it should.
#pragma once

#include <cstdint>
#include <string>

#include "ops/error.h"

namespace flownpu::gpu {

// The kind of an GpuError, for callers that treat kinds differently.
enum class Failure : std::uint8_t {
  kNoLoader,    // no loader: nothing of OpenCL, or Vulkan, is installed
  kNoPlatform,  // a loader that finds no implementation
  kNoDevice,    // no device of the wanted kind in any implementation
  kMemory,      // no memory for a buffer
  kProgram,     // a kernel did not compile
  kCommand,     // any other call was refused, or the device is lost
  kForked,      // the process was forked since the loader was loaded
  kTime,  // kernels did not end within the limit, or the device was given up before they ended
};

class GpuError : public DeviceFailed {
 public:
  GpuError(Failure failure, const std::string& message)
      : DeviceFailed(message), failure_(failure) {}
  Failure failure() const { return failure_; }

 private:
  Failure failure_;
};

}  // namespace flownpu::gpu
