// SPDX-License-Identifier: Apache-2.0
// Winograd's F(2 x 2, 3 x 3) (Lavin and Gray, arXiv:1509.09308): for windows of 3 x 3 neighbouring
// pixels, tiles d of 4 x 4 pixels and weights g of 3 x 3 give 2 x 2 pixels
//     y = A^T [sum over channels (G g G^T) * (B^T d B)] A.
//
// Dataflow: a work-group computes 32 rows of the result for 16 tiles. For four channels at a time,
// 64 lanes read a tile each and 128 others a row's nine weights, and both write transformed ones
// into the work-group's memory; then 16 lanes for each of the 16 products add them to 8 rows and 4
// tiles, which are registers. Behind all channels the sums pass through that memory, 8 rows at a
// time, because a tile's 16 sums are in as many lanes. All stages being one kernel, no transformed
// image goes through main memory, which holds 4 numbers for each pixel of it, and the weight stays
// as it is: transforming it takes 28 operations for the 512 multiplications of its 16 numbers.
//
// Errors: the transforms of a tile and of a weight round an element at most twice and four times
// along their two axes, that of the result four times, each relative to the sum of its terms'
// magnitudes.
#include "ops/gpu/kernels/images/convolution.h"
#include "ops/gpu/kernels/pieces.h"

namespace flownpu::gpu {
namespace {

constexpr std::int64_t kLanes = 256;
constexpr std::int64_t kTiles = 16;
constexpr std::int64_t kTileRows = 32;
constexpr std::int64_t kStep = 4;  // channels at a time; with these sizes they are 12 KiB

// The lane's own tile is that which it reads.
constexpr const char* kBody = R"(
  const int across = (args.result_width + 1) / 2;
  const int tiles_of_image = (args.plane / args.result_width + 1) / 2 * across;
  const int tiles = args.columns / args.plane * tiles_of_image;
  const int first_tile = group(0) * args.tiles;
  const int first_row = group(1) * args.tile;
  const int own = min(first_tile + lane() % args.tiles, tiles - 1);
  const int image = own / tiles_of_image;
  const int first_y = own % tiles_of_image / across * 2 - args.head_y;
  const int first_x = own % tiles_of_image % across * 2 - args.head_x;
  const int product = lane() / 16;
  const int down = lane() / 4 % 4;
  const int over = lane() % 4;
  shared float4 left[16 * args.step * args.tile / 4];
  shared float4 right[16 * args.step * args.tiles / 4];
  float4 sums[8];
  unrolled for (int i = 0; i < 8; ++i) sums[i] = 0.0f;
  for (int start = 0; start < args.channels; start += args.step) {
    if (lane() < args.readers) {
      const int of_step = lane() / args.tiles;
      TILE
    } else if (lane() < args.readers + args.step * args.tile) {
      const int of_step = (lane() - args.readers) % args.step;
      const int of_tile = (lane() - args.readers) / args.step;
      WEIGHT
    }
    synchronise();
    unrolled for (int k = 0; k < args.step; ++k) {
      const float4 four = right[(product * args.step + k) * (args.tiles / 4) + over];
      const float4 upper = left[(product * args.step + k) * (args.tile / 4) + down * 2];
      const float4 lower = left[(product * args.step + k) * (args.tile / 4) + down * 2 + 1];
      sums[0] += upper.x * four;
      sums[1] += upper.y * four;
      sums[2] += upper.z * four;
      sums[3] += upper.w * four;
      sums[4] += lower.x * four;
      sums[5] += lower.y * four;
      sums[6] += lower.z * four;
      sums[7] += lower.w * four;
    }
    synchronise();
  }
  for (int quarter = 0; quarter < 4; ++quarter) {
    if (down == quarter) {
      unrolled for (int i = 0; i < 8; ++i) left[(product * 8 + i) * 4 + over] = sums[i];
    }
    synchronise();
    RESULT
    synchronise();
  }
)";

// B^T d B, along columns and then along rows.
constexpr const char* kTile = R"(
      float d[16];
      unrolled for (int i = 0; i < 16; ++i) {
        const int y = first_y + i / 4;
        const int x = first_x + i % 4;
        float element = 0.0f;
        if (start + of_step < args.channels && y >= 0 && y < args.height * args.upsample && x >= 0 &&
            x < args.width * args.upsample)
          element = args.x.Read(image, group(2) * args.channels + start + of_step,
                                y / args.upsample, x / args.upsample);
        d[i] = element;
      }
      unrolled for (int j = 0; j < 4; ++j) {
        const float second = d[4 + j];
        const float third = d[8 + j];
        d[j] = d[j] - third;
        d[4 + j] = second + third;
        d[8 + j] = third - second;
        d[12 + j] = second - d[12 + j];
      }
      unrolled for (int i = 0; i < 4; ++i) {
        const int at = (i * 4 * args.step + of_step) * args.tiles + lane() % args.tiles;
        const int next = args.step * args.tiles;
        ((shared float*)right)[at] = d[4 * i] - d[4 * i + 2];
        ((shared float*)right)[at + next] = d[4 * i + 1] + d[4 * i + 2];
        ((shared float*)right)[at + 2 * next] = d[4 * i + 2] - d[4 * i + 1];
        ((shared float*)right)[at + 3 * next] = d[4 * i + 1] - d[4 * i + 3];
      }
)";

// G g G^T, likewise.
constexpr const char* kWeight = R"(
      float g[9];
      unrolled for (int i = 0; i < 9; ++i) {
        float element = 0.0f;
        if (start + of_step < args.channels && first_row + of_tile < args.rows)
          element = args.w.Read(group(2) * args.rows + first_row + of_tile,
                                (start + of_step) * 9 + i);
        g[i] = element;
      }
      float spread[12];
      unrolled for (int j = 0; j < 3; ++j) {
        const float ends = 0.5f * (g[j] + g[6 + j]);
        const float middle = 0.5f * g[3 + j];
        spread[j] = g[j];
        spread[3 + j] = ends + middle;
        spread[6 + j] = ends - middle;
        spread[9 + j] = g[6 + j];
      }
      unrolled for (int i = 0; i < 4; ++i) {
        const float ends = 0.5f * (spread[3 * i] + spread[3 * i + 2]);
        const float middle = 0.5f * spread[3 * i + 1];
        const int at = (i * 4 * args.step + of_step) * args.tile + of_tile;
        const int next = args.step * args.tile;
        ((shared float*)left)[at] = spread[3 * i];
        ((shared float*)left)[at + next] = ends + middle;
        ((shared float*)left)[at + 2 * next] = ends - middle;
        ((shared float*)left)[at + 3 * next] = spread[3 * i + 2];
      }
)";

// A^T p A of a row's tile: a lane has one of its two lines.
constexpr const char* kResult = R"(
    const int line = lane() / 128;
    const int row = first_row + quarter * 8 + lane() / 16 % 8;
    const int tile = first_tile + lane() % 16;
    const int y = tile % tiles_of_image / across * 2 + line;
    const int x = tile % tiles_of_image % across * 2;
    float columns[4];
    unrolled for (int j = 0; j < 4; ++j) {
      const int at = j * 128 + lane() % 128;
      const float first = ((shared float*)left)[at + line * 512];
      const float second = ((shared float*)left)[at + 512 + line * 512];
      const float third = ((shared float*)left)[at + 1024 + line * 512];
      columns[j] = line == 0 ? first + second + third : first - second - third;
    }
    if (row < args.rows && tile < tiles && y < args.plane / args.result_width) {
      { const float sum = columns[0] + columns[1] + columns[2]; WRITE }
      if (x + 1 < args.result_width) { const float sum = columns[1] - columns[2] - columns[3]; NEXT }
    }
)";

constexpr const char* kWrite =
    "args.y.Write(sum, tile / tiles_of_image, group(2) * args.rows + row, y * args.result_width + "
    "x);";

}  // namespace

KernelDescription winograd(const ConvolutionShape& shape) {
  KernelDescription kernel = convolution(shape);
  kernel.name = "winograd";
  kernel.body = replaced(kBody, {{"TILE", kTile},
                                 {"WEIGHT", kWeight},
                                 {"RESULT", kResult},
                                 {"WRITE", kWrite},
                                 {"NEXT", replaced(kWrite, "+ x)", "+ x + 1)")}});
  kernel.constants = {{"upsample", shape.upsample},
                      {"tile", kTileRows},
                      {"tiles", kTiles},
                      {"step", kStep},
                      {"readers", kStep * kTiles}};
  kernel.lanes = kLanes;
  return kernel;
}

Grid winograd_grid(const ConvolutionShape& shape, std::int64_t columns, std::int64_t plane,
                   std::int64_t width) {
  const std::int64_t tiles =
      columns / plane * q4nx::ceil_div(plane / width, 2) * q4nx::ceil_div(width, 2);
  return {.groups = {q4nx::ceil_div(tiles, kTiles), q4nx::ceil_div(shape.rows, kTileRows),
                     shape.groups},
          .lanes = kLanes};
}

}  // namespace flownpu::gpu
