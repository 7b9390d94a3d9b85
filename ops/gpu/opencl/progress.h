// SPDX-License-Identifier: Apache-2.0
// The progress of a queue, found by polling marks that lie between commands. OpenCL's own waits
// have no limit, so that a kernel that never ends would hold a thread for ever. Its callbacks run
// when the driver's thread for them wakes up, on NVIDIA (580.159) every 6 ms: with three of these
// waits a token took 19 ms, of which its kernels were 4.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

#include "ops/gpu/opencl/abi.h"

namespace flownpu::gpu {

// Commands between two marks. A mark costs some microseconds, and a token has one to four.
inline constexpr std::int64_t kCommandsOfMark = 64;

// The end of an event's command: kComplete or its error; nothing if it did not end within `limit`.
// Throws GpuError if the driver does not say.
std::optional<cl::Int> end_of(cl::Event event, std::chrono::milliseconds limit);

}  // namespace flownpu::gpu
