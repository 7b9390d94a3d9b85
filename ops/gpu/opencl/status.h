// SPDX-License-Identifier: Apache-2.0
// An OpenCL call's status code as an error: the call, the code's name, and what to do.
#pragma once

#include <string>
#include <string_view>

#include "ops/gpu/context/failure.h"
#include "ops/gpu/opencl/abi.h"

namespace flownpu::gpu {

// "CL_OUT_OF_RESOURCES", or the number as text if the name is not known.
std::string name_of_code(cl::Int code);

// Throws GpuError unless the code is CL_SUCCESS. `call`: the function's name; `what`: what it
// was for ("kernel fused_dqp"); `details`: more to tell, such as a compiler's log.
void check(cl::Int code, std::string_view call, std::string_view what,
           std::string_view details = "");

}  // namespace flownpu::gpu
