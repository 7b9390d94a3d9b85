// SPDX-License-Identifier: Apache-2.0
// RMS norm of rows; a work-group has a row. A residual is added to x whenever x is read.
#include "ops/gpu/kernels/kernels.h"

namespace flownpu::gpu {
namespace {

// A token's norm is a chain of reads, sums and waits. With 256 lanes, the most that every GPU takes
// in a work-group, each lane has few columns. Rows of fewer columns take 64 lanes.
constexpr std::int64_t kMostLanes = 256;

std::int64_t lanes_for(std::int64_t columns) { return columns < kMostLanes ? 64 : kMostLanes; }

// Sets `square` to its sum over all lanes, in two stages: 16 lanes add every 16th each, then every
// lane adds these 16. A tree would have eight barriers.
constexpr const char* kReduce = R"(
  squares[lane()] = square;
  synchronise();
  square = 0.0f;
  if (lane() < 16) {
    for (int other = lane(); other < args.lanes; other += 16) square += squares[other];
    sixteenths[lane()] = square;
  }
  synchronise();
  square = 0.0f;
  for (int one = 0; one < 16; ++one) square += sixteenths[one];
)";

constexpr const char* kNormSkip = R"(
  for (int k = lane(); k < args.columns; k += args.lanes) {
    const float x = args.skip.Read(row % args.skips, k);
    square += x * x;
  }
  REDUCE
  const float inverse_skip = 1.0f / sqrt(square / (float)args.columns + args.epsilon);
  square = 0.0f;
)";

// NORM_SKIP comes first if the skip is normalised. SUM is x, or x plus the skip. KEEP writes it if
// the sum is wanted.
constexpr const char* kBody = R"(
  const int row = group(0);
  shared float squares[args.lanes];
  shared float sixteenths[16];
  float square = 0.0f;
  NORM_SKIP
  for (int k = lane(); k < args.columns; k += args.lanes) {
    const float x = SUM;
    KEEP
    square += x * x;
  }
  REDUCE
  const float inverse = 1.0f / sqrt(square / (float)args.columns + args.epsilon);
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
                           .constants = {{"columns", shape.columns}, {"epsilon", shape.epsilon}},
                           .lanes = lanes_for(shape.columns)};
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
  return {.groups = {rows, 1, 1}, .lanes = lanes_for(columns)};
}

}  // namespace flownpu::gpu
