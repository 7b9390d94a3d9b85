// SPDX-License-Identifier: Apache-2.0
// How far a queue has come: seen by looking at marks that lie between commands. OpenCL's own waits
// have no limit, and a kernel that never ends would hold a thread for ever; its callbacks come when
// the driver's thread for them wakes up: NVIDIA's (580.159) every 6 ms, three of which were a
// token's 19 ms of which its kernels took 4.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

#include "ops/gpu/opencl/abi.h"
#include "ops/gpu/opencl/devices.h"

namespace flownpu::gpu {

// Commands between two marks, one of which costs some microseconds: one to four marks a token.
inline constexpr std::int64_t kCommandsOfMark = 64;

// Seconds for which none of the kernels that were launched may end, in the environment.
inline constexpr const char* kTimeVariable = "FLOWNPU_GPU_TIMEOUT";

// That limit, else the device's. Throws Error for what is no number of seconds.
std::chrono::milliseconds time_limit(const DeviceFacts& facts);

// How the command of an event ended, kComplete or its error; nothing if it did not within `limit`.
// Throws OpenClError where the driver does not tell.
std::optional<cl::Int> end_of(cl::Event event, std::chrono::milliseconds limit);

}  // namespace flownpu::gpu
