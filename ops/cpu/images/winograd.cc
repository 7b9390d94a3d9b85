// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/images/winograd.h"

#include <algorithm>
#include <array>
#include <vector>

#include "ops/cpu/images/channels_last.h"
#include "ops/cpu/products/dense_matmul.h"
#include "ops/cpu/products/q4nx_matmul_plan.h"

namespace flownpu::cpu {
namespace {

constexpr std::int64_t kTaps = 9;
// A tile's pixels each way, at most, its products, and the pixels that it gives each way.
constexpr std::int64_t kMostSide = 4;
constexpr std::int64_t kMostProducts = kMostSide * kMostSide;
constexpr std::int64_t kStep = 2;
// Tiles that a task multiplies together: whole tiles of a kernel's 12 rows. Their rows (0.5 MB for
// 320 channels in bf16) and a block of the weight fill a second-level cache of 1 MB. A weight that
// leaves the third-level cache no room is read half as often (Zen 5: 1280 channels of 16 x 16
// pixels 9.4 ms with 96 tiles, 10.6 with 48; 512 of 128 x 128 55 and 51).
constexpr std::int64_t kTaskTiles = 48;
constexpr std::int64_t kMostTaskTiles = 2 * kTaskTiles;
constexpr std::int64_t kLargeWeight = 8 << 20;
constexpr std::int64_t kTasksPerThread = 8;
// Rows of tiles that are made at once, in bytes: they stay in a third-level cache beside the
// weight. Up to twice as many are made together, so that their weight is read once.
constexpr std::int64_t kRowsBytes = 4 << 20;

// G g of three taps.
using Spread = std::array<float, kMostSide> (*)(float a, float b, float c);
std::array<float, kMostSide> spread(float a, float b, float c) {
  const float ends = 0.5F * (a + c);
  const float middle = 0.5F * b;
  return {a, ends + middle, ends - middle, c};
}
std::array<float, kMostSide> spread_upsampled(float a, float b, float c) {
  return {a, a + b + c, c};
}

// G g G^T of the taps of some channels [channels][9]: to[side^2 * stride], a channel each.
void transform_weight(Spread spread, std::int64_t side, const float* taps, std::int64_t channels,
                      float* to, std::int64_t stride) {
  for (std::int64_t channel = 0; channel < channels; ++channel, taps += kTaps) {
    std::array<float, kMostSide> columns[3];
    for (int j = 0; j < 3; ++j) columns[j] = spread(taps[j], taps[3 + j], taps[6 + j]);
    for (std::int64_t i = 0; i < side; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const auto row = spread(columns[0][at], columns[1][at], columns[2][at]);
      for (std::int64_t j = 0; j < side; ++j)
        to[(i * side + j) * stride + channel] = row[static_cast<std::size_t>(j)];
    }
  }
}

bool has_neighbours(const SlidingWindows& windows) {
  const auto& [deep, down, across] = windows.windows();
  const auto fits = [](const Windows& axis) {
    return axis.kernel == 3 && axis.stride == 1 && axis.dilation == 1;
  };
  return windows.rank() == 4 && fits(down) && fits(across);
}

std::int64_t tiles_of(const Windows& axis) { return q4nx::ceil_div(axis.count, kStep); }

}  // namespace

struct Winograd::Tiles {
  std::int64_t products() const { return side * side; }
  // The pixels that the lines of tiles [begin, end) read of an axis, without pads.
  Range pixels(const Windows& axis, const Interval& lines) const {
    return {std::max<std::int64_t>(0, axis.begin(step * lines.begin)),
            std::min(axis.size, axis.begin(step * (lines.end - 1)) + side)};
  }

  // Pixels each way, and from one tile to the next.
  std::int64_t side;
  std::int64_t step;
  Spread spread;
  const WinogradTransforms& transforms;
};

Winograd::Tiles Winograd::tiles() const {
  if (form_ == Form::kUpsampled)
    return {3, 1, spread_upsampled, context_.kernels.winograd_of_upsampled};
  return {4, kStep, spread, context_.kernels.winograd};
}

// Lines of tiles [first, last), counted over all images, and the lines of pixels that they read:
// those of whole images, or, if they are of one image, a strip of it.
struct Winograd::Part {
  std::int64_t first;
  std::int64_t last;
  std::int64_t image;
  std::int64_t images;
  Range lines;
};

struct Winograd::Work {
  RoundedActivations rows;
  std::int64_t element = 0;
  std::int64_t across = 0;
  std::int64_t down = 0;
  // Parts of each image; 0: all images are one part.
  std::int64_t parts = 0;
  std::int64_t most_tiles = 0;
  std::byte* turned = nullptr;
  float* zeros = nullptr;
  std::byte* values = nullptr;
};

Winograd::Winograd(const Context& context, Form form, std::int64_t channels, std::int64_t m)
    : context_(context),
      form_(form),
      rounding_(context.kernels.dense_rounding(false, DataType::kFloat32)),
      channels_(channels),
      m_(m) {}

bool Winograd::takes(const SlidingWindows& windows, std::int64_t channels, std::int64_t m) {
  return has_neighbours(windows) && std::min(channels, m) >= kLeastChannels;
}

bool Winograd::takes_upsampled(const SlidingWindows& windows) {
  const auto& [deep, down, across] = windows.windows();
  const auto fits = [](const Windows& axis) { return axis.head == 1 && axis.tail == 1; };
  return has_neighbours(windows) && windows.has_explicit_pads() && fits(down) && fits(across);
}

void Winograd::keep(const void* weight, DataType type) {
  const Tiles form = tiles();
  const std::int64_t block_bytes = context_.kernels.dense_block_bytes(channels_, rounding_);
  const std::int64_t blocks = q4nx::ceil_div(m_, kDenseColumns);
  kept_ = allocate_weight(static_cast<std::size_t>(blocks * form.products() * block_bytes));
  const std::int64_t row = channels_ * kTaps;
  context_.pool->run(blocks, [&](std::int64_t block) {
    const std::int64_t columns = std::min(kDenseColumns, m_ - block * kDenseColumns);
    std::vector<float> taps(static_cast<std::size_t>(row));
    std::vector<float> transformed(static_cast<std::size_t>(form.products() * columns * channels_));
    for (std::int64_t c = 0; c < columns; ++c) {
      const std::int64_t at = (block * kDenseColumns + c) * row;
      const float* from = static_cast<const float*>(weight) + at;
      if (type != DataType::kFloat32) {
        context_.kernels.widen(static_cast<const std::uint16_t*>(weight) + at, type, taps.data(),
                               row);
        from = taps.data();
      }
      transform_weight(form.spread, form.side, from, channels_, transformed.data() + c * channels_,
                       columns * channels_);
    }
    for (std::int64_t i = 0; i < form.products(); ++i) {
      const DenseWeight one{transformed.data() + i * columns * channels_,
                            DataType::kFloat32,
                            channels_,
                            columns,
                            true,
                            nullptr};
      context_.kernels.pack_dense(one, 0, rounding_,
                                  kept_.get() + (block * form.products() + i) * block_bytes);
    }
  });
}

Winograd::Work Winograd::take(Scratch& scratch, const Images& images) const {
  const Tiles form = tiles();
  Work work;
  work.rows = rounded_rows(rounding_, channels_);
  work.element = rounding_.type == DenseType::kBFloat16 ? 2 : 4;
  work.across = tiles_of(images.across);
  work.down = tiles_of(images.down);
  const std::int64_t tile_bytes = form.products() * work.rows.padded_k * work.element;
  std::int64_t lines = images.count * images.down.size;
  work.most_tiles = images.count * work.down * work.across;
  if (work.most_tiles * tile_bytes > 2 * kRowsBytes) {
    work.parts =
        std::min(work.down, q4nx::ceil_div(work.down * work.across * tile_bytes, kRowsBytes));
    const std::int64_t most = q4nx::ceil_div(work.down, work.parts);
    work.most_tiles = most * work.across;
    lines = std::min(images.down.size, form.step * (most - 1) + form.side);
  }
  work.turned = scratch.take<std::byte>(lines * images.across.size * channels_ * 4);
  work.zeros = scratch.take<float>(channels_);
  work.values = scratch.take<std::byte>(work.most_tiles * tile_bytes);
  work.rows.values = work.values;
  return work;
}

std::size_t Winograd::scratch_bytes(const Images& images) const {
  Scratch scratch;
  take(scratch, images);
  return scratch.bytes();
}

void Winograd::run(const Images& images, const ProductEpilogue& epilogue, std::byte* memory) const {
  Scratch scratch(memory);
  const Work work = take(scratch, images);
  const Tiles form = tiles();
  std::fill_n(work.zeros, channels_, 0.0F);
  const auto run_part = [&](const Part& part) {
    transform(images, work, part);
    multiply(images, work, part, epilogue);
  };
  if (work.parts == 0)
    return run_part({0, images.count * work.down, 0, images.count, {0, images.down.size}});
  for (std::int64_t image = 0; image < images.count; ++image) {
    for (std::int64_t i = 0; i < work.parts; ++i) {
      const Interval tiles = cpu::part(work.down, work.parts, i);
      run_part({image * work.down + tiles.begin, image * work.down + tiles.end, image, 1,
                form.pixels(images.down, tiles)});
    }
  }
}

// The rows [side^2][tiles][C] of a part's tiles.
void Winograd::transform(const Images& images, const Work& work, const Part& part) const {
  const Tiles form = tiles();
  const std::int64_t width = images.across.size;
  const std::int64_t strip = part.lines.size() * width;
  turn_channels_last(context_,
                     {images.x + part.image * images.stride, part.images, images.stride, channels_,
                      images.down.size * width, part.lines.first * width, strip},
                     DataType::kFloat32, work.turned);
  const auto* turned = reinterpret_cast<const float*>(work.turned);
  const std::int64_t tiles = (part.last - part.first) * work.across;
  context_.pool->run_rows(tiles, [&](std::int64_t tile) {
    const std::int64_t line = part.first + tile / work.across;
    const float* image = turned + (line / work.down - part.image) * strip * channels_;
    const std::int64_t top = images.down.begin(line % work.down * form.step);
    const std::int64_t left = images.across.begin(tile % work.across * form.step);
    const float* pixels[kMostProducts];
    for (std::int64_t i = 0; i < form.side; ++i) {
      for (std::int64_t j = 0; j < form.side; ++j) {
        const std::int64_t y = top + i;
        const std::int64_t x = left + j;
        const bool is_inside = y >= 0 && y < images.down.size && x >= 0 && x < width;
        pixels[i * form.side + j] =
            is_inside ? image + ((y - part.lines.first) * width + x) * channels_ : work.zeros;
      }
    }
    form.transforms.input(pixels, channels_, work.rows.padded_k, work.element == 2,
                          work.values + tile * work.rows.padded_k * work.element,
                          tiles * work.rows.padded_k);
  });
}

// Tasks are in the order of the blocks, so that a weight which is larger than the caches is read
// once.
void Winograd::multiply(const Images& images, const Work& work, const Part& part,
                        const ProductEpilogue& epilogue) const {
  const Tiles form = tiles();
  const std::int64_t tiles = (part.last - part.first) * work.across;
  const std::int64_t blocks = q4nx::ceil_div(m_, kDenseColumns);
  const std::int64_t block_bytes = context_.kernels.dense_block_bytes(channels_, rounding_);
  const std::int64_t each =
      blocks * form.products() * block_bytes > kLargeWeight ? kMostTaskTiles : kTaskTiles;
  const std::int64_t row_parts = q4nx::ceil_div(tiles, each);
  const std::int64_t block_parts =
      std::min(blocks, q4nx::ceil_div(kTasksPerThread * context_.pool->threads(), row_parts));
  const std::int64_t values_bytes = tiles * work.rows.padded_k * work.element;
  context_.pool->run(row_parts * block_parts, [&](std::int64_t task) {
    const auto [first, last] = cpu::part(tiles, row_parts, task % row_parts);
    const auto [begin, end] = cpu::part(blocks, block_parts, task / row_parts);
    alignas(64) float products[kMostProducts * kMostTaskTiles * kDenseColumns];
    alignas(64) float lines[2 * kStep * kMostTaskTiles * kDenseColumns];
    const std::int64_t stride = (last - first) * kDenseColumns;
    for (std::int64_t block = begin; block < end; ++block) {
      RoundedActivations rows = work.rows;
      for (std::int64_t i = 0; i < form.products(); ++i) {
        rows.values = work.values + i * values_bytes;
        context_.kernels.matmul_dense(kept_.get() + (block * form.products() + i) * block_bytes,
                                      rounding_.type, rows, first, last - first, kDenseColumns,
                                      products + i * stride);
      }
      // Tiles of one line of tiles make two lines of pixels.
      for (std::int64_t tile = first; tile < last;) {
        const std::int64_t at = part.first * work.across + tile;
        const std::int64_t count = std::min(last - tile, work.across - at % work.across);
        const std::int64_t x = at % work.across * kStep;
        const std::int64_t y = at / work.across % work.down * kStep;
        form.transforms.output(products + (tile - first) * kDenseColumns, stride, count, lines);
        const std::int64_t width = std::min(kStep * count, images.across.count - x);
        ProductEpilogue of_line = epilogue;
        for (std::int64_t i = 0; i < kStep && y + i < images.down.count; ++i) {
          of_line.first_pixel =
              (at / work.across / work.down * images.down.count + y + i) * images.across.count + x;
          context_.kernels.finish_product(lines + i * kStep * count * kDenseColumns, 1, 0, width,
                                          block * kDenseColumns, of_line);
        }
        tile += count;
      }
    }
  });
}

}  // namespace flownpu::cpu
