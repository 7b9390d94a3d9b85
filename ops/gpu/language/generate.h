// SPDX-License-Identifier: Apache-2.0
// Source of a kernel: its text, with logical coordinates rewritten to places in memory, constants
// to numbers, and the code that is linked to its outputs put where they are written.
#pragma once

#include <string>

#include "ops/gpu/language/dialect.h"
#include "ops/gpu/language/kernel.h"

namespace flownpu::gpu {

// `activation`: what kActivation tensors are stored as, float32, or float16 for half the bytes;
// kernels compute in float either way. Throws Error, with the kernel's name and the words, for a
// name that the description lacks, a wrong number of coordinates, a word that a tensor of that
// element or access does not have, a tensor in an image that is not a Q4NX weight to be read, or
// parentheses that do not close.
std::string generate(const KernelDescription& kernel, const Dialect& dialect,
                     Element activation = Element::kFloat32);

}  // namespace flownpu::gpu
