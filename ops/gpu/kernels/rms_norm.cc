// SPDX-License-Identifier: Apache-2.0
// RMS norm of rows; a work-group has a row. A residual is added to x whenever x is read.
#include "ops/gpu/kernels/kernels.h"
#include "ops/gpu/kernels/pieces.h"

namespace flownpu::gpu {
namespace {

constexpr const char* kNormSkip = R"(
  for (int k = lane(); k < args.columns; k += args.lanes) {
    const float x = args.skip.Read(ROW_OF_SKIP, k);
    sum += x * x;
  }
  REDUCE
  const float inverse_skip = 1.0f / sqrt(sum / (float)args.columns + args.epsilon);
  sum = 0.0f;
)";

// NORM_SKIP comes first if the skip is normalised. SUM is x, or x plus the skip. KEEP writes it if
// the sum is wanted.
constexpr const char* kNormOfRow = R"(
  float sum = 0.0f;
  NORM_SKIP
  for (int k = lane(); k < args.columns; k += args.lanes) {
    const float x = SUM;
    KEEP
    sum += x * x;
  }
  REDUCE
  const float inverse = 1.0f / sqrt(sum / (float)args.columns + args.epsilon);
)";

constexpr const char* kBody = R"(
  const int row = group(0);
  shared float sums[args.lanes];
  shared float sixteenths[16];
  NORM
  for (int k = lane(); k < args.columns; k += args.lanes)
    args.y.Write(NORMALISED, row, k);
)";

constexpr const char* kRowOfSkip = "row % args.skips";

std::string sum_of(const NormShape& shape, const std::string& row_of_skip, const std::string& word,
                   const std::string& k) {
  std::string sum = "args.x." + word + "(row, " + k + ")";
  if (shape.has_skip) sum += " + args.skip." + word + "(" + row_of_skip + ", " + k + ")";
  if (shape.norms_skip) sum += " * inverse_skip * args.skip_weight." + word + "(" + k + ")";
  return sum;
}

}  // namespace

std::string norm_of_row(const NormShape& shape, const std::string& row_of_skip,
                        const std::string& keeps) {
  const std::string keep = "if (" + keeps + ") { args.sum.Write(x, row, k); }";
  return replaced(kNormOfRow, {{"NORM_SKIP", shape.norms_skip ? kNormSkip : ""},
                               {"ROW_OF_SKIP", row_of_skip},
                               {"REDUCE", over_lanes()},
                               {"SUM", sum_of(shape, row_of_skip, "Read", "k")},
                               {"KEEP", shape.writes_sum ? keep : ""}});
}

std::string normalised(const NormShape& shape, const std::string& row_of_skip,
                       const std::string& word, const std::string& k) {
  return "(" + sum_of(shape, row_of_skip, word, k) + ") * inverse * args.weight." + word + "(" + k +
         ")";
}

void add_skip(const NormShape& shape, KernelDescription& kernel) {
  const std::vector<Size> sizes{std::string("rows"), shape.columns};
  if (shape.has_skip) kernel.tensors.push_back({.name = "skip", .sizes = sizes});
  if (shape.norms_skip) kernel.tensors.push_back({.name = "skip_weight", .sizes = {shape.columns}});
  if (shape.writes_sum)
    kernel.tensors.push_back({.name = "sum", .access = Access::kWrite, .sizes = sizes});
}

KernelDescription rms_norm(const NormShape& shape) {
  const std::string rows = "rows";
  const std::string body =
      replaced(kBody, "NORMALISED", normalised(shape, kRowOfSkip, "Read", "k"));
  KernelDescription kernel{.name = "rms_norm",
                           .body = replaced(body, "NORM", norm_of_row(shape, kRowOfSkip, "1")),
                           .tensors = {{.name = "x", .sizes = {rows, shape.columns}},
                                       {.name = "weight", .sizes = {shape.columns}},
                                       {.name = "y",
                                        .element = Element::kActivation,
                                        .access = Access::kWrite,
                                        .sizes = {rows, shape.columns}}},
                           .constants = {{"columns", shape.columns}, {"epsilon", shape.epsilon}},
                           .lanes = lanes_of_row(shape.columns)};
  add_skip(shape, kernel);
  if (shape.has_skip) kernel.parameters = {"skips"};
  return kernel;
}

Grid rms_norm_grid(std::int64_t columns, std::int64_t rows) {
  return {.groups = {rows, 1, 1}, .lanes = lanes_of_row(columns)};
}

}  // namespace flownpu::gpu
