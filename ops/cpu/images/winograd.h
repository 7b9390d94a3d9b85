// SPDX-License-Identifier: Apache-2.0
// Convolutions of 3 x 3 taps, one pixel apart, by Winograd's F(2 x 2, 3 x 3).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "ops/cpu/step.h"
#include "ops/cpu/windows.h"

namespace flownpu::cpu {

// Tiles of 4 x 4 pixels become 16 rows of channels each (kernels/winograd.cc), 16 products of the
// tiles' rows with packed weights [C][M] give 2 x 2 pixels a tile: 16 products for 36.
//
// In bf16 the error is 5/3 of that of the windows' products: for independent inputs of variance 1,
// a term's variance, that of the tile's sum times that of the weight's, adds up to 25 where the
// nine taps have 9. The sums of four pixels are made in f32, and rounded once.
class Winograd {
 public:
  // Transforms take as long as 2.5 (C + M) dots, the products C M / 4 of them instead of 9 C M /
  // 16 (16 columns a dot of pairs): 32 channels of each gain a quarter.
  static constexpr std::int64_t kLeastChannels = 32;

  // The images of a call: the first channel's plane of the first image, and its windows.
  struct Images {
    const float* x = nullptr;
    std::int64_t count = 0;
    std::int64_t stride = 0;
    Windows down;
    Windows across;
  };

  Winograd(const Context& context, std::int64_t channels, std::int64_t m);

  static bool takes(const SlidingWindows& windows, std::int64_t channels, std::int64_t m);

  // Packs the transformed weight [M][C][3][3].
  void keep(const void* weight, DataType type);

  std::size_t scratch_bytes(const Images& images) const;
  // epilogue.y, residual and bias are those of the first channel.
  void run(const Images& images, const ProductEpilogue& epilogue, std::byte* scratch) const;

 private:
  struct Work;
  struct Part;

  Work take(Scratch& scratch, const Images& images) const;
  void transform(const Images& images, const Work& work, const Part& part) const;
  void multiply(const Images& images, const Work& work, const Part& part,
                const ProductEpilogue& epilogue) const;

  Context context_;
  DenseRounding rounding_;
  std::int64_t channels_;
  std::int64_t m_;
  // Blocks of 32 columns, each of 16 packed weights.
  std::shared_ptr<std::byte> kept_;
};

}  // namespace flownpu::cpu
