// SPDX-License-Identifier: Apache-2.0
// Reads environment variables.
#pragma once

#include <chrono>

namespace flownpu {

// The number of seconds in an environment variable, as at least 1 ms; `otherwise` if it is not set.
// Throws Error unless it is a number above 0 and at most 1e6.
std::chrono::milliseconds seconds_of(const char* variable, std::chrono::milliseconds otherwise);

}  // namespace flownpu
