// SPDX-License-Identifier: Apache-2.0
// Source of a kernel. Logical coordinates in its text become places in memory, constants become
// numbers, and linked code is put at the outputs' writes.
#pragma once

#include <string>

#include "ops/gpu/language/dialect.h"
#include "ops/gpu/language/kernel.h"

namespace flownpu::gpu {

// `activation`: what kActivation tensors are stored as, float32, or float16 for half the bytes;
// kernels compute in float either way. Throws Error, with the kernel's name and the words, for: an
// unknown name; a wrong number of coordinates; a word that the tensor's element or access does not
// allow; an image that is not a Q4NX weight to be read; parentheses that do not close.
std::string generate(const KernelDescription& kernel, const Dialect& dialect,
                     Element activation = Element::kFloat32);

}  // namespace flownpu::gpu
