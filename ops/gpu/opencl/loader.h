// SPDX-License-Identifier: Apache-2.0
// Finds OpenCL when the process first asks for it: the ICD loader, which finds implementations.
#pragma once

#include <string>

#include "ops/gpu/opencl/abi.h"

namespace flownpu::gpu {

// Environment variable: the loader's file, for systems whose linker does not find it.
inline constexpr const char* kLoaderVariable = "FLOWNPU_OPENCL";

// The loader's functions. Throws GpuError (kNoLoader), which names the missing file and the command
// that installs it; kForked (loaded_api.h).
const cl::Functions& opencl();

bool opencl_is_parents();
void check_opencl_is_own();

// Loads the functions from this file; "" means the file that the environment names or the linker
// finds. Throws as opencl() does.
cl::Functions load_opencl(const std::string& file);

}  // namespace flownpu::gpu
