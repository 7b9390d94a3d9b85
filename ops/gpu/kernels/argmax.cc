// SPDX-License-Identifier: Apache-2.0
// ArgMax along the last axis, so that logits need not be moved to the host: a work-group has a row,
// a lane every 256th element.
#include "ops/gpu/kernels/kernels.h"

namespace flownpu::gpu {
namespace {

// A vocabulary has 10^5 tokens, and there is one row. So a work-group has as many lanes as every
// GPU takes.
constexpr std::int64_t kLanes = 256;

constexpr const char* kBody = R"(
  const int row = group(0);
  shared float values[args.lanes];
  shared int places[args.lanes];
  float largest = -INFINITY;
  int place = args.columns;
  for (int k = lane(); k < args.columns; k += args.lanes) {
    const float value = args.x.Read(row, k);
    if (value > largest || (value == largest && k < place)) {
      largest = value;
      place = k;
    }
  }
  values[lane()] = largest;
  places[lane()] = place;
  synchronise();
  for (int step = args.lanes / 2; step > 0; step /= 2) {
    if (lane() < step) {
      const float value = values[lane() + step];
      const int other = places[lane() + step];
      if (value > values[lane()] || (value == values[lane()] && other < places[lane()])) {
        values[lane()] = value;
        places[lane()] = other;
      }
    }
    synchronise();
  }
  if (lane() == 0) {
    const int found = isnan(args.x.Read(row, 0)) ? 0 : places[0];
    args.y.Write(found, row);
  }
)";

}  // namespace

KernelDescription argmax(std::int64_t columns) {
  return {.name = "argmax",
          .body = kBody,
          .tensors = {{.name = "x", .sizes = {std::string("rows"), columns}},
                      {.name = "y",
                       .element = Element::kInt32,
                       .access = Access::kWrite,
                       .sizes = {std::string("rows")}}},
          .constants = {{"columns", columns}},
          .lanes = kLanes};
}

}  // namespace flownpu::gpu
