// SPDX-License-Identifier: Apache-2.0
// The OpenCL devices of this machine.
#pragma once

#include <string>
#include <vector>

#include "ops/gpu/context/facts.h"
#include "ops/gpu/opencl/abi.h"

namespace flownpu::gpu {

// A device, as OpenCL knows it.
struct FoundDevice {
  cl::Platform platform = nullptr;
  cl::DeviceId id = nullptr;
  DeviceFacts facts;
};

// Names of all platforms, including those without a device. Throws GpuError where a call fails.
std::vector<std::string> platforms();
// All devices that are available and can compile. Throws GpuError where a call fails.
std::vector<FoundDevice> devices();
// The first device whose title contains `wanted`; for "" the first GPU, else the first device of
// any kind. Throws GpuError (kNoLoader, kNoPlatform, kNoDevice; else where a call fails).
FoundDevice choose_device(const std::string& wanted);

}  // namespace flownpu::gpu
