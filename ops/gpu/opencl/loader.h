// SPDX-License-Identifier: Apache-2.0
// Finds OpenCL when the process first asks for it: the ICD loader, which finds implementations.
#pragma once

#include <string>

#include "ops/gpu/opencl/abi.h"

namespace flownpu::gpu {

// Environment variable: the loader's file, for systems whose linker does not find it.
inline constexpr const char* kLoaderVariable = "FLOWNPU_OPENCL";

// The loader's functions. It stays loaded, since implementations have threads of their own. Throws
// OpenClError (kNoLoader) that says which file was looked for, and how to install one; a call after
// that looks again. Throws OpenClError (kForked) in a process that was forked since.
const cl::Functions& opencl();

// Whether this process was forked from one that had loaded OpenCL. Implementations have threads of
// their own, which it lacks: nothing of OpenCL can be called, and what the parent made of it is
// left as it is.
bool opencl_is_parents();
// Throws OpenClError (kForked) if it was.
void check_opencl_is_own();

// Loads the functions from this file; "": from the one that the environment names or the linker
// finds. Throws as opencl() does.
cl::Functions load_opencl(const std::string& file);

}  // namespace flownpu::gpu
