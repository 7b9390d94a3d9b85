// SPDX-License-Identifier: Apache-2.0
// The code of a core (`Op`, program.h) as words.
#pragma once

#include <cstddef>

#include "aie/emulator/program.h"

namespace flownpu::emulator {

// Words of each argument of a call.
inline constexpr std::size_t kArgumentWords = 3;

// Words of an operation, including its own, without the words of a call's arguments.
std::size_t words(Op op);

// Throws Error unless every word is an operation or an operand that the operation may name: a part
// of the array, a variable or a view of the core, the beginning of an operation. Whether a kernel's
// integer arguments make sense is not checked.
void check_code(const CoreRecord& core, const Array& array);

}  // namespace flownpu::emulator
