// SPDX-License-Identifier: Apache-2.0
// The frame of products whose factors are read element by element: DenseMatMul, the product of two
// activations, convolution.
#pragma once

#include <string>

#include "ops/gpu/language/kernel.h"
#include "ops/gpu/opencl/context.h"

namespace flownpu::gpu {

// The order in which neighbouring lanes read a factor: along the columns of the right one, or along
// the depth, whichever is the memory's.
enum class ReadAlong : std::uint8_t { kDepth, kColumns };

// Pieces of the kernel's text. `row`, `k` and `column` are the place in left [rows, depth] or right
// [depth, columns].
struct TiledProduct {
  // Expressions of sizes.
  std::string rows;
  std::string depth;
  std::string columns;
  // Declarations before the loop. With kColumns a lane reads one column of the right factor, `own`.
  std::string setup = {};
  // Statements that assign to `element`, which is 0.
  std::string left;
  std::string right;
  ReadAlong right_along = ReadAlong::kColumns;
  // The statement that writes `sum`, the element of the product.
  std::string write;
};

// Sets body, constants and lanes of the kernel. The third axis of its grid is the caller's.
void fill_tiled_product(const TiledProduct& product, KernelDescription& kernel);
Grid tiled_product_grid(std::int64_t rows, std::int64_t columns, std::int64_t third = 1);

}  // namespace flownpu::gpu
