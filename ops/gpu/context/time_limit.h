// SPDX-License-Identifier: Apache-2.0
// How long a device's commands may take.
#pragma once

#include <chrono>

#include "ops/gpu/context/facts.h"

namespace flownpu::gpu {

// Environment variable: seconds to wait for the commands before a mark.
inline constexpr const char* kTimeVariable = "FLOWNPU_GPU_TIMEOUT";

// The limit that the variable sets, else the device's default. Throws Error if the variable is not
// a number of seconds.
std::chrono::milliseconds time_limit(const DeviceFacts& facts);

}  // namespace flownpu::gpu
