// SPDX-License-Identifier: Apache-2.0
// Norms with a mean: of rows (layer norm), or of the pixels of a group of channels (group norm),
// which follow one another in memory. A work-group has a row, and reads it three times: for its
// mean, for the squares of what differs from it, and for the result.
#include "ops/gpu/kernels/kernels.h"
#include "ops/gpu/kernels/pieces.h"

namespace flownpu::gpu {
namespace {

constexpr std::int64_t kLanes = 256;  // as many as every GPU takes

constexpr const char* kBody = R"(
  const int row = group(0);
  shared float sums[args.lanes];
  shared float sixteenths[16];
  float sum = 0.0f;
  for (int k = lane(); k < args.columns; k += args.lanes) sum += args.x.Read(row, k);
  REDUCE
  const float mean = sum / (float)args.columns;
  sum = 0.0f;
  for (int k = lane(); k < args.columns; k += args.lanes) {
    const float x = args.x.Read(row, k) - mean;
    sum += x * x;
  }
  REDUCE
  const float inverse = 1.0f / sqrt(sum / (float)args.columns + args.epsilon);
  for (int k = lane(); k < args.columns; k += args.lanes) {
    const int of_weight = row % args.groups * (args.columns / args.pixels) + k / args.pixels;
    args.y.Write((args.x.Read(row, k) - mean) * inverse * args.scale.Read(of_weight) SHIFT, row, k);
  }
)";

}  // namespace

KernelDescription layer_norm(const LayerNormShape& shape) {
  const auto tensor = [&](const char* name, std::vector<Size> sizes) {
    return TensorDescription{.name = name, .element = shape.given, .sizes = std::move(sizes)};
  };
  KernelDescription kernel{
      .name = "layer_norm",
      .body = replaced(replaced(kBody, "REDUCE", over_lanes()), "SHIFT",
                       shape.has_shift ? "+ args.shift.Read(of_weight)" : ""),
      .tensors = {tensor("x", {"rows", "columns"}), tensor("scale", {"channels"}),
                  tensor("y", {"rows", "columns"})},
      .constants = {{"epsilon", shape.epsilon}},
      .parameters = {"columns", "groups", "pixels"},
      .lanes = kLanes};
  kernel.tensors.back().access = Access::kWrite;
  if (shape.has_shift) kernel.tensors.push_back(tensor("shift", {"channels"}));
  if (shape.is_silu) kernel.links["y"] = {{.code = "value = value / (1.0f + exp(-value));"}};
  return kernel;
}

}  // namespace flownpu::gpu
