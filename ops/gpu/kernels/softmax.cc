// SPDX-License-Identifier: Apache-2.0
// Softmax of rows. A work-group has a row, and reads it three times: for its largest element, for
// the sum of what remains of each beside it, and for the result.
#include "ops/gpu/kernels/kernels.h"
#include "ops/gpu/kernels/pieces.h"

namespace flownpu::gpu {
namespace {

constexpr std::int64_t kLanes = 64;

constexpr const char* kBody = R"(
  const int row = group(0);
  shared float sums[args.lanes];
  shared float sixteenths[16];
  float sum = -INFINITY;
  for (int k = lane(); k < args.columns; k += args.lanes) sum = fmax(sum, args.x.Read(row, k));
  LARGEST
  const float largest = sum;
  sum = 0.0f;
  for (int k = lane(); k < args.columns; k += args.lanes)
    sum += exp(args.x.Read(row, k) - largest);
  SUM
  for (int k = lane(); k < args.columns; k += args.lanes) {
    args.y.Write(exp(args.x.Read(row, k) - largest) / sum, row, k);
  }
)";

}  // namespace

KernelDescription softmax(Element given) {
  return {.name = "softmax",
          .body = replaced(replaced(kBody, "LARGEST", over_lanes(true)), "SUM", over_lanes()),
          .tensors = {{.name = "x", .element = given, .sizes = {"rows", "columns"}},
                      {.name = "y",
                       .element = given,
                       .access = Access::kWrite,
                       .sizes = {"rows", "columns"}}},
          .parameters = {"columns"},
          .lanes = kLanes};
}

}  // namespace flownpu::gpu
