// SPDX-License-Identifier: Apache-2.0
// RMS norm of rows; a work-group has a row. A residual is added to x whenever x is read.
#include "ops/gpu/kernels/kernels.h"
#include "ops/gpu/kernels/pieces.h"

namespace flownpu::gpu {
namespace {

constexpr const char* kNormSkip = R"(
  for (int k = lane(); k < args.columns; k += args.lanes) {
    const float x = args.skip.Read(row % args.skips, k);
    sum += x * x;
  }
  REDUCE
  const float inverse_skip = 1.0f / sqrt(sum / (float)args.columns + args.epsilon);
  sum = 0.0f;
)";

// NORM_SKIP comes first if the skip is normalised. SUM is x, or x plus the skip. KEEP writes it if
// the sum is wanted.
constexpr const char* kBody = R"(
  const int row = group(0);
  shared float sums[args.lanes];
  shared float sixteenths[16];
  float sum = 0.0f;
  NORM_SKIP
  for (int k = lane(); k < args.columns; k += args.lanes) {
    const float x = SUM;
    KEEP
    sum += x * x;
  }
  REDUCE
  const float inverse = 1.0f / sqrt(sum / (float)args.columns + args.epsilon);
  for (int k = lane(); k < args.columns; k += args.lanes) {
    const float x = SUM;
    args.y.Write(x * inverse * args.weight.Read(k), row, k);
  }
)";

}  // namespace

KernelDescription rms_norm(const NormShape& shape) {
  const std::string rows = "rows";
  std::string sum = "args.x.Read(row, k)";
  if (shape.has_skip) sum += " + args.skip.Read(row % args.skips, k)";
  if (shape.norms_skip) sum += " * inverse_skip * args.skip_weight.Read(k)";
  const std::string keep = shape.writes_sum ? "args.sum.Write(x, row, k);" : "";
  std::string body = replaced(kBody, "NORM_SKIP", shape.norms_skip ? kNormSkip : "");
  body = replaced(replaced(replaced(body, "REDUCE", over_lanes()), "SUM", sum), "KEEP", keep);
  KernelDescription kernel{.name = "rms_norm",
                           .body = body,
                           .tensors = {{.name = "x", .sizes = {rows, shape.columns}},
                                       {.name = "weight", .sizes = {shape.columns}},
                                       {.name = "y",
                                        .element = Element::kActivation,
                                        .access = Access::kWrite,
                                        .sizes = {rows, shape.columns}}},
                           .constants = {{"columns", shape.columns}, {"epsilon", shape.epsilon}},
                           .lanes = lanes_of_row(shape.columns)};
  if (shape.has_skip) {
    kernel.tensors.push_back({.name = "skip", .sizes = {rows, shape.columns}});
    if (shape.norms_skip)
      kernel.tensors.push_back({.name = "skip_weight", .sizes = {shape.columns}});
    kernel.parameters = {"skips"};
  }
  if (shape.writes_sum) {
    kernel.tensors.push_back(
        {.name = "sum", .access = Access::kWrite, .sizes = {rows, shape.columns}});
  }
  return kernel;
}

Grid rms_norm_grid(std::int64_t columns, std::int64_t rows) {
  return {.groups = {rows, 1, 1}, .lanes = lanes_of_row(columns)};
}

}  // namespace flownpu::gpu
