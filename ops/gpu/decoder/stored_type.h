// SPDX-License-Identifier: Apache-2.0
// The type in which a decoder's kernels store values for one another, with the reason. float16
// takes half the bytes. The residual stream, its addends, gated products and logits are always
// float32; gated products of Gemma3 exceed float16's 65504.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "ops/device.h"
#include "ops/gpu/context/context.h"
#include "ops/gpu/language/kernel.h"

namespace flownpu::gpu {

struct StoredType {
  Element element = Element::kFloat32;  // or float16
  std::string why;

  std::int64_t bytes() const { return element == Element::kFloat16 ? 2 : 4; }
  // "fp16 (gpu_dtype = fp16)".
  std::string text() const;
};

// `wrong`: returns how many numbers the driver converts wrongly; called only if it matters. Throws
// Error if `wanted` is float16 and there are such numbers.
StoredType stored_type_of(const DeviceFacts& facts, GpuDtype wanted,
                          const std::function<std::int64_t()>& wrong);
// The same for a device, whose conversions are tested once for each driver. Callers hold the
// context's mutex. Throws GpuError, too.
StoredType choose_stored_type(Context& context, GpuDtype wanted);

// A kernel that converts all numbers of float16 to float32, and rounds the middle of each two
// neighbours to float16. Arguments: halves float16 [65536], floats [65536], middles [65536],
// rounded float16 [65536]; it writes floats and rounded.
KernelDescription convert_halves();

// How many of these 131,072 conversions differ from IEEE 754's (to the nearest, ties to even; any
// NaN is right for a NaN). `kernel`: convert_halves(), or a test's. It is run once for each driver,
// and the result kept beside the compiled kernels.
std::int64_t wrong_halves(Context& context, const KernelDescription& kernel);

}  // namespace flownpu::gpu
