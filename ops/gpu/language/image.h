// SPDX-License-Identifier: Apache-2.0
// A tensor's second storage, in OpenCL C: its memory as an image, which GPUs read through their
// texture units and texture caches. It is an image1d_buffer_t, which OpenCL 1.2 has without an
// extension: nothing is copied, because texels are the memory's bytes. A texel is four uint32, the
// only integer format of 16 bytes that every device with images has.
#pragma once

#include <string>

#include "ops/gpu/language/kernel.h"

namespace flownpu::gpu::image {

// Functions that the expressions of read() call; they stand before the kernel.
std::string functions();
// The type of the kernel's argument.
std::string type();
// An expression: the bytes at `offset` of `image` as one `type`, which is uchar, ushort, ushort8 or
// uint4. The offset is a multiple of the type's size.
std::string read(const std::string& type, const std::string& image, const std::string& offset);

}  // namespace flownpu::gpu::image
