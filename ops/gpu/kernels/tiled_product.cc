// SPDX-License-Identifier: Apache-2.0
// Dataflow: a work-group computes a tile of 32 rows and 64 columns. It reads 16 columns of the left
// factor and the rows of the right one for them into its own memory, the left one transposed
// [step, tile], and waits; then each of its 64 lanes adds them to 8 rows and 4 columns of the
// result, which are registers. For 32 multiplications a lane so reads 3 vectors of 4.
#include "ops/gpu/kernels/pieces.h"

namespace flownpu::gpu {
namespace {

constexpr std::int64_t kLanes = 64;
constexpr std::int64_t kOver = 16;  // lanes beside one another, each with 4 columns
constexpr std::int64_t kTileColumns = 4 * kOver;
constexpr std::int64_t kTileRows = kLanes / kOver * 8;
// Columns of the left factor at a time; with 32 rows and 64 columns they are 6 KiB.
constexpr std::int64_t kStep = 16;

constexpr const char* kBody = R"(
  const int first_row = group(1) * args.tile;
  const int first_column = group(0) * args.wide;
  const int own = min(first_column + lane(), COLUMNS - 1);
  SETUP
  const int down = lane() / args.over;
  const int over = lane() % args.over;
  shared float4 left[args.step * args.tile / 4];
  shared float4 right[args.step * args.over];
  float4 sums[8];
  unrolled for (int i = 0; i < 8; ++i) sums[i] = 0.0f;
  for (int start = 0; start < DEPTH; start += args.step) {
    for (int i = lane(); i < args.step * args.wide; i += args.lanes) {
      const int k = start + K_OF;
      const int column = first_column + COLUMN_OF;
      float element = 0.0f;
      if (k < DEPTH && column < COLUMNS) { RIGHT }
      ((shared float*)right)[(k - start) * args.wide + COLUMN_OF] = element;
    }
    for (int i = lane(); i < args.step * args.tile; i += args.lanes) {
      const int k = start + i % args.step;
      const int row = first_row + i / args.step;
      float element = 0.0f;
      if (k < DEPTH && row < ROWS) { LEFT }
      ((shared float*)left)[(k - start) * args.tile + i / args.step] = element;
    }
    synchronise();
    for (int k = 0; k < args.step; ++k) {
      const float4 four = right[k * args.over + over];
      const float4 upper = left[k * (args.tile / 4) + down * 2];
      const float4 lower = left[k * (args.tile / 4) + down * 2 + 1];
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
  unrolled for (int i = 0; i < 8; ++i) {
    const int row = first_row + down * 8 + i;
    const float values[4] = {sums[i].x, sums[i].y, sums[i].z, sums[i].w};
    unrolled for (int j = 0; j < 4; ++j) {
      const int column = first_column + over * 4 + j;
      if (row < ROWS && column < COLUMNS) {
        const float sum = values[j];
        WRITE
      }
    }
  }
)";

}  // namespace

void fill_tiled_product(const TiledProduct& product, KernelDescription& kernel) {
  const bool along_depth = product.right_along == ReadAlong::kDepth;
  kernel.body = replaced(kBody, {{"K_OF", along_depth ? "i % args.step" : "i / args.wide"},
                                 {"COLUMN_OF", along_depth ? "i / args.step" : "i % args.wide"},
                                 {"SETUP", product.setup},
                                 {"RIGHT", product.right},
                                 {"LEFT", product.left},
                                 {"WRITE", product.write},
                                 {"ROWS", product.rows},
                                 {"DEPTH", product.depth},
                                 {"COLUMNS", product.columns}});
  kernel.constants.insert(
      {{"tile", kTileRows}, {"wide", kTileColumns}, {"over", kOver}, {"step", kStep}});
  kernel.lanes = kLanes;
}

Grid tiled_product_grid(std::int64_t rows, std::int64_t columns, std::int64_t third) {
  return {.groups = {q4nx::ceil_div(columns, kTileColumns), q4nx::ceil_div(rows, kTileRows), third},
          .lanes = kLanes};
}

}  // namespace flownpu::gpu
