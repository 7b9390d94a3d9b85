// SPDX-License-Identifier: Apache-2.0
// RMS norm of rows, a work-group a row; a residual is added while it is read.
#include "ops/gpu/kernels/kernels.h"

namespace flownpu::gpu {
namespace {

// The sum of `square` of all lanes, in squares[0].
constexpr const char* kReduce = R"(
  squares[lane()] = square;
  synchronise();
  for (int step = args.lanes / 2; step > 0; step /= 2) {
    if (lane() < step) squares[lane()] += squares[lane() + step];
    synchronise();
  }
)";

constexpr const char* kNormSkip = R"(
  for (int k = lane(); k < args.columns; k += args.lanes) {
    const float x = args.skip.Read(row % args.skips, k);
    square += x * x;
  }
  REDUCE
  const float inverse_skip = 1.0f / sqrt(squares[0] / (float)args.columns + args.epsilon);
  synchronise();
  square = 0.0f;
)";

// NORM_SKIP comes first where the skip is normalised; SUM is x, or x and the skip; KEEP writes it
// where it is asked for.
constexpr const char* kBody = R"(
  const int row = group(0);
  shared float squares[args.lanes];
  float square = 0.0f;
  NORM_SKIP
  for (int k = lane(); k < args.columns; k += args.lanes) {
    const float x = SUM;
    KEEP
    square += x * x;
  }
  REDUCE
  const float inverse = 1.0f / sqrt(squares[0] / (float)args.columns + args.epsilon);
  for (int k = lane(); k < args.columns; k += args.lanes) {
    const float x = SUM;
    args.y.Write(x * inverse * args.weight.Read(k), row, k);
  }
)";

std::string replaced(std::string text, const std::string& word, const std::string& by) {
  for (std::size_t at = text.find(word); at != std::string::npos;
       at = text.find(word, at + by.size()))
    text.replace(at, word.size(), by);
  return text;
}

}  // namespace

KernelDescription rms_norm(const NormShape& shape) {
  const std::string rows = "rows";
  std::string sum = "args.x.Read(row, k)";
  if (shape.has_skip) sum += " + args.skip.Read(row % args.skips, k)";
  if (shape.norms_skip) sum += " * inverse_skip * args.skip_weight.Read(k)";
  const std::string keep = shape.writes_sum ? "args.sum.Write(x, row, k);" : "";
  std::string body = replaced(kBody, "NORM_SKIP", shape.norms_skip ? kNormSkip : "");
  body = replaced(replaced(replaced(body, "REDUCE", kReduce), "SUM", sum), "KEEP", keep);
  KernelDescription kernel{.name = "rms_norm",
                           .body = body,
                           .tensors = {{.name = "x", .sizes = {rows, shape.columns}},
                                       {.name = "weight", .sizes = {shape.columns}},
                                       {.name = "y",
                                        .element = Element::kActivation,
                                        .access = Access::kWrite,
                                        .sizes = {rows, shape.columns}}},
                           .constants = {{"columns", shape.columns}, {"epsilon", shape.epsilon}}};
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

Grid rms_norm_grid(std::int64_t rows) {
  return {.groups = {rows, 1, 1}, .lanes = KernelDescription{}.lanes};
}

}  // namespace flownpu::gpu
