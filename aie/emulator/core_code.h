// SPDX-License-Identifier: Apache-2.0
// The code of a core (`Op`, program.h) as words.
#pragma once

#include <cstddef>

#include "aie/emulator/program.h"

namespace flownpu::emulator {

// Words of each argument of a call.
inline constexpr std::size_t kArgumentWords = 3;

// Words of an operation, itself among them, but not a call's arguments.
std::size_t words(Op op);

// Throws Error unless every word names an operation, or what the operation may use: something of
// the array, a variable or a view of the core's, the beginning of an operation. What a kernel makes
// of its numbers is not known here.
void check_code(const CoreRecord& core, const Array& array);

}  // namespace flownpu::emulator
