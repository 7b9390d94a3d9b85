// SPDX-License-Identifier: Apache-2.0
// Images as products read them: channels-last, [pixels][C].
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/cpu/products/q4nx_matmul_plan.h"
#include "ops/cpu/step.h"

namespace flownpu::cpu {

// Pixels [first, first + pixels) of the planes of `channels` channels of `images` images, f32.
struct ImagePlanes {
  const float* x = nullptr;
  std::int64_t images = 0;
  std::int64_t image_stride = 0;
  std::int64_t channels = 0;
  std::int64_t plane = 0;
  std::int64_t first = 0;
  std::int64_t pixels = 0;
};

// to[images][pixels][channels], f32 or rounded to bf16.
inline void turn_channels_last(const Context& context, const ImagePlanes& from, DataType type,
                               std::byte* to) {
  if (from.channels == 1 && type == DataType::kFloat32) {  // as it lies
    for (std::int64_t image = 0; image < from.images; ++image) {
      std::copy_n(from.x + image * from.image_stride + from.first, from.pixels,
                  reinterpret_cast<float*>(to) + image * from.pixels);
    }
    return;
  }
  const auto element = static_cast<std::int64_t>(size_of(type));
  // A task reads 1 KB of each plane, or, to keep all threads busy, 256 bytes.
  constexpr std::int64_t kMost = 256;
  constexpr std::int64_t kLeast = 64;
  const bool is_large = from.images * from.pixels >= kMost * 4 * context.pool->threads();
  const std::int64_t each = is_large ? kMost : kLeast;
  const std::int64_t blocks = q4nx::ceil_div(from.pixels, each);
  context.pool->run(from.images * blocks, [&](std::int64_t task) {
    const std::int64_t image = task / blocks;
    const std::int64_t first = task % blocks * each;
    context.kernels.channels_last(from.x + image * from.image_stride + from.first + first,
                                  from.plane, from.channels, std::min(each, from.pixels - first),
                                  type == DataType::kBFloat16,
                                  to + (image * from.pixels + first) * from.channels * element);
  });
}

}  // namespace flownpu::cpu
