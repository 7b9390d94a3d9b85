// SPDX-License-Identifier: Apache-2.0
// As what a decoder's kernels store what they leave for one another, and why. float16 is half the
// bytes; what it may not hold is float32 all the same: the residual stream, what is added to it,
// gated products (those of Gemma3 are known to go beyond its 65504) and logits.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "ops/device.h"
#include "ops/gpu/language/kernel.h"
#include "ops/gpu/opencl/context.h"

namespace flownpu::gpu {

struct StoredType {
  Element element = Element::kFloat32;  // or float16
  std::string why;

  std::int64_t bytes() const { return element == Element::kFloat16 ? 2 : 4; }
  // "fp16 (gpu_dtype = fp16)".
  std::string text() const;
};

// `wrong`: how many numbers the driver converts wrongly, asked for where it matters. Throws Error
// where float16 is asked for, and there are such.
StoredType stored_type_of(const DeviceFacts& facts, GpuDtype wanted,
                          const std::function<std::int64_t()>& wrong);
// That of a device. Who calls it holds the context's mutex. Throws OpenClError, too.
StoredType choose_stored_type(Context& context, GpuDtype wanted);

// Writes all numbers of float16 as float32, and writes as float16 what lies in the middle of two of
// them. Arguments: halves float16 [65536], floats [65536], middles [65536], rounded float16
// [65536], of which the second and the fourth are written.
KernelDescription convert_halves();

// How many of these 131,072 numbers a device gets wrong: of IEEE 754's, to the nearest, ties to
// even; a NaN is any. `kernel`: convert_halves, or a test's. It is run once for each driver, and
// its result kept beside the compiled kernels.
std::int64_t wrong_halves(Context& context, const KernelDescription& kernel);

}  // namespace flownpu::gpu
