// SPDX-License-Identifier: Apache-2.0
// Q4NXGather: dequantised rows of a table; a lane has an element.
#include "ops/gpu/kernels/kernels.h"

namespace flownpu::gpu {
namespace {

constexpr std::int64_t kLanes = 64;

constexpr const char* kBody = R"(
  const int k = group(0) * args.lanes + lane();
  const int row = args.indices.Read(group(1));
  if (k < args.columns) {
    args.y.Write(args.w.Read(row, k), group(1), k);
  }
)";

}  // namespace

KernelDescription q4nx_gather(std::int64_t rows, std::int64_t columns, const q4nx::Layout& layout) {
  const std::string count = "count";
  return {.name = "q4nx_gather",
          .body = kBody,
          .tensors =
              {{.name = "w", .element = Element::kQ4NX, .sizes = {rows, columns}, .layout = layout},
               {.name = "indices", .element = Element::kInt32, .sizes = {count}},
               {.name = "y", .access = Access::kWrite, .sizes = {count, columns}}},
          .constants = {{"columns", columns}},
          .lanes = kLanes};
}

Grid q4nx_gather_grid(std::int64_t columns, std::int64_t count) {
  return {.groups = {q4nx::ceil_div(columns, kLanes), count, 1}, .lanes = kLanes};
}

}  // namespace flownpu::gpu
