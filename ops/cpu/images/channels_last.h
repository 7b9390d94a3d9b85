// SPDX-License-Identifier: Apache-2.0
// Images as products read them: channels-last, [pixels][C].
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/cpu/plane.h"
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
  // Pixels and channels that are turned together: 16 KB.
  constexpr std::int64_t kTurned = 64;
  if (from.channels == 1 && type == DataType::kFloat32) {  // as it lies
    for (std::int64_t image = 0; image < from.images; ++image) {
      std::copy_n(from.x + image * from.image_stride + from.first, from.pixels,
                  reinterpret_cast<float*>(to) + image * from.pixels);
    }
    return;
  }
  const auto element = static_cast<std::int64_t>(size_of(type));
  const std::int64_t blocks = q4nx::ceil_div(from.pixels, kTurned);
  context.pool->run(from.images * blocks, [&](std::int64_t task) {
    alignas(64) float tile[kTurned * kTurned];
    const std::int64_t image = task / blocks;
    const std::int64_t first = task % blocks * kTurned;
    const std::int64_t rows = std::min(kTurned, from.pixels - first);
    const float* x = from.x + image * from.image_stride + from.first + first;
    std::byte* out = to + (image * from.pixels + first) * from.channels * element;
    for (std::int64_t c = 0; c < from.channels; c += kTurned) {
      const std::int64_t columns = std::min(kTurned, from.channels - c);
      transpose(x + c * from.plane, from.plane, tile, kTurned, rows, columns);
      for (std::int64_t row = 0; row < rows; ++row) {
        context.kernels.store_cache(tile + row * kTurned, out + (row * from.channels + c) * element,
                                    type, columns);
      }
    }
  });
}

}  // namespace flownpu::cpu
