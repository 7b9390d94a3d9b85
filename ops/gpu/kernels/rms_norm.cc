// SPDX-License-Identifier: Apache-2.0
// RMS norm of rows, a work-group a row; a residual is added while it is read.
#include "ops/gpu/kernels/kernels.h"

namespace flownpu::gpu {
namespace {

// SUM is x, or x and the skip; KEEP writes it where it is asked for.
constexpr const char* kBody = R"(
  const int row = group(0);
  shared float squares[args.lanes];
  float square = 0.0f;
  for (int k = lane(); k < args.columns; k += args.lanes) {
    const float x = SUM;
    KEEP
    square += x * x;
  }
  squares[lane()] = square;
  synchronise();
  for (int step = args.lanes / 2; step > 0; step /= 2) {
    if (lane() < step) squares[lane()] += squares[lane() + step];
    synchronise();
  }
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
  const std::string sum = shape.has_skip
                              ? "args.x.Read(row, k) + args.skip.Read(row % args.skips, k)"
                              : "args.x.Read(row, k)";
  const std::string keep = shape.writes_sum ? "args.sum.Write(x, row, k);" : "";
  KernelDescription kernel{
      .name = "rms_norm",
      .body = replaced(replaced(kBody, "SUM", sum), "KEEP", keep),
      .tensors = {{.name = "x", .sizes = {rows, shape.columns}},
                  {.name = "weight", .sizes = {shape.columns}},
                  {.name = "y", .access = Access::kWrite, .sizes = {rows, shape.columns}}},
      .constants = {{"columns", shape.columns}, {"epsilon", shape.epsilon}}};
  if (shape.has_skip) {
    kernel.tensors.push_back({.name = "skip", .sizes = {rows, shape.columns}});
    kernel.parameters = {"skips"};
  }
  if (shape.writes_sum) {
    kernel.tensors.push_back(
        {.name = "sum", .access = Access::kWrite, .sizes = {rows, shape.columns}});
  }
  return kernel;
}

}  // namespace flownpu::gpu
