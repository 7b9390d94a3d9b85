// SPDX-License-Identifier: Apache-2.0
// An OpenCL call's status code as an error: the call, the code's name, and what to do.
#pragma once

#include <string>
#include <string_view>

#include "ops/error.h"
#include "ops/gpu/opencl/abi.h"

namespace flownpu::gpu {

// The kind of an OpenClError, for callers that treat kinds differently.
enum class Failure : std::uint8_t {
  kNoLoader,    // no ICD loader: nothing of OpenCL is installed
  kNoPlatform,  // a loader that finds no implementation
  kNoDevice,    // no device of the wanted kind in any implementation
  kMemory,      // no memory for a buffer
  kProgram,     // a kernel did not compile
  kCommand,     // any other call was refused, or the device is lost
  kForked,      // the process was forked since OpenCL was loaded
  kTime,  // kernels did not end within the limit, or the device was given up before they ended
};

class OpenClError : public DeviceFailed {
 public:
  OpenClError(Failure failure, const std::string& message)
      : DeviceFailed(message), failure_(failure) {}
  Failure failure() const { return failure_; }

 private:
  Failure failure_;
};

// "CL_OUT_OF_RESOURCES", or the number as text if the name is not known.
std::string name_of_code(cl::Int code);

// Throws OpenClError unless the code is CL_SUCCESS. `call`: the function's name; `what`: what it
// was for ("kernel fused_dqp"); `details`: more to tell, such as a compiler's log.
void check(cl::Int code, std::string_view call, std::string_view what,
           std::string_view details = "");

}  // namespace flownpu::gpu
