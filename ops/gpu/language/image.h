// SPDX-License-Identifier: Apache-2.0
// A tensor's second storage, in OpenCL C: its memory as an image, which GPUs read through their
// texture units and the caches of these. It is an image1d_buffer_t, which OpenCL 1.2 has without an
// extension: nothing is copied, since texels are the memory's bytes. A texel is four uint32, the
// one format of so many bytes and of integers that every device with images has.
#pragma once

#include <string>

#include "ops/gpu/language/kernel.h"

namespace flownpu::gpu::image {

// What expressions of read() call; it stands before the kernel.
std::string functions();
// The type of the kernel's argument.
std::string type();
// The bytes at `offset` of `image`, as one of uchar, ushort, ushort8 and uint4: an expression. The
// offset is a multiple of their size.
std::string read(const std::string& type, const std::string& image, const std::string& offset);

}  // namespace flownpu::gpu::image
