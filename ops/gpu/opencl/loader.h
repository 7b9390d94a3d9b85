// SPDX-License-Identifier: Apache-2.0
// Finds OpenCL when the process first asks for it: the ICD loader, which finds implementations.
#pragma once

#include <string>

#include "ops/gpu/opencl/abi.h"

namespace flownpu::gpu {

// Names the loader's file where the system's linker does not find it; in the environment.
inline constexpr const char* kLoaderVariable = "FLOWNPU_OPENCL";

// The loader's functions. It stays loaded, as implementations' threads want. Throws OpenClError
// (kNoLoader) that says which file was looked for, and the command that installs one; asked again
// after that, it looks again.
const cl::Functions& opencl();

// The same, of this file: "" for what the environment and the linker find.
cl::Functions load_opencl(const std::string& file);

}  // namespace flownpu::gpu
