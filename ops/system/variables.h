// SPDX-License-Identifier: Apache-2.0
// What environment variables say.
#pragma once

#include <chrono>

namespace flownpu {

// The seconds that a variable says, 0.001 at least; `otherwise` where it is not set. Throws Error
// for what is no number above 0.
std::chrono::milliseconds seconds_of(const char* variable, std::chrono::milliseconds otherwise);

}  // namespace flownpu
