// SPDX-License-Identifier: Apache-2.0
// Convolutions of 3 x 3 taps, one pixel apart, by tiles that give 2 x 2 pixels each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "ops/cpu/step.h"
#include "ops/cpu/windows.h"

namespace flownpu::cpu {

// Tiles of 4 x 4 pixels become 16 rows of channels each (kernels/winograd.cc), 16 products of the
// tiles' rows with packed weights [C][M] give 2 x 2 pixels a tile: 16 products for 36. This is
// Winograd's F(2 x 2, 3 x 3).
//
// Images that are read twice as large, each pixel repeated each way, need 9 products: along an axis
// the pixels that stem from pixel b between a and c are, with taps f, g, h,
//   f a + (g + h) b = f (a - b) + (f + g + h) b
//   (f + g) b + h c = (f + g + h) b + h (c - b).
//
// In bf16 the error is 5/3 of that of the windows' products: for independent inputs of variance 1,
// a term's variance, that of the tile's sum times that of the weight's, adds up to 25 where the
// nine taps have 9. The sums of four pixels are made in f32, and rounded once. Images that are read
// twice as large have the same factor: along an axis 2 * 1 + 1 * 3 where the taps have 1 + 2.
class Winograd {
 public:
  // Transforms take as long as 2.5 (C + M) dots, the products C M / 4 of them instead of 9 C M /
  // 16 (16 columns a dot of pairs): 32 channels of each gain a quarter.
  static constexpr std::int64_t kLeastChannels = 32;

  enum class Form : std::uint8_t { kAsTheyAre, kUpsampled };

  // The images of a call, in the size in which they are stored: the first channel's plane of the
  // first image, and the windows of the convolution, fitted to the size in which they are read.
  struct Images {
    const float* x = nullptr;
    std::int64_t count = 0;
    std::int64_t stride = 0;
    Windows down;
    Windows across;
  };

  Winograd(const Context& context, Form form, std::int64_t channels, std::int64_t m);

  static bool takes(const SlidingWindows& windows, std::int64_t channels, std::int64_t m);

  // The same for images that are read twice as large: pads of one pixel are all it takes.
  static bool takes_upsampled(const SlidingWindows& windows);

  // Packs the transformed weight [M][C][3][3].
  void keep(const void* weight, DataType type);

  std::size_t scratch_bytes(const Images& images) const;
  // epilogue.y, residual and bias are those of the first channel.
  void run(const Images& images, const ProductEpilogue& epilogue, std::byte* scratch) const;

 private:
  struct Work;
  struct Part;
  struct Tiles;

  Tiles tiles() const;

  Work take(Scratch& scratch, const Images& images) const;
  void transform(const Images& images, const Work& work, const Part& part) const;
  void multiply(const Images& images, const Work& work, const Part& part,
                const ProductEpilogue& epilogue) const;

  Context context_;
  Form form_;
  DenseRounding rounding_;
  std::int64_t channels_;
  std::int64_t m_;
  // Blocks of 32 columns, each of a packed weight for each product.
  std::shared_ptr<std::byte> kept_;
};

}  // namespace flownpu::cpu
