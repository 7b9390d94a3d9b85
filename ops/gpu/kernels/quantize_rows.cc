// SPDX-License-Identifier: Apache-2.0
// Rounds activations to int8, in a kernel of its own before the product, as in ML Drift's prefill.
// Eight lanes have a group of 32 columns, 4 neighbouring ones each: x = scale * integer, where
// integer = x * (127 / largest), to the nearest, as on the CPU. They exchange their largest
// magnitudes, and the sums of their integers, through the work-group's memory. The product
// multiplies the sum of a group's integers by the weight's minimum.
#include <limits>

#include "ops/gpu/kernels/kernels.h"

namespace flownpu::gpu {
namespace {

constexpr std::int64_t kLanes = 64;
constexpr std::int64_t kGroups = kLanes / 8;

// If the largest magnitude is not above `negligible`, 127 / largest would be infinite, so all codes
// are 0. A NaN stays the largest, and makes the scale NaN.
constexpr const char* kBody = R"(
  const int token = group(1);
  const int g = group(0) * (args.lanes / 8) + lane() / 8;
  const int first = g * 32 + lane() % 8 * 4;
  shared float largest_of[args.lanes];
  shared int sum_of[args.lanes];
  float x[4];
  float largest = 0.0f;
  for (int i = 0; i < 4; ++i) {
    x[i] = first + i < args.columns ? args.x.Read(token, first + i) : 0.0f;
    const float magnitude = fabs(x[i]);
    largest = isnan(largest) || magnitude <= largest ? largest : magnitude;
  }
  largest_of[lane()] = largest;
  synchronise();
  for (int other = lane() / 8 * 8; other < lane() / 8 * 8 + 8; ++other) {
    const float magnitude = largest_of[other];
    largest = isnan(largest) || magnitude <= largest ? largest : magnitude;
  }
  const float inverse = largest > args.negligible ? 127.0f / largest : 0.0f;
  int sum = 0;
  for (int i = 0; i < 4; ++i) {
    const int code = convert_char_sat_rte(x[i] * inverse);
    if (g < args.groups) {
      args.codes.Write(code, token, first + i);
    }
    sum += code;
  }
  sum_of[lane()] = sum;
  synchronise();
  if (lane() % 8 == 0 && g < args.groups) {
    for (int other = lane() + 1; other < lane() + 8; ++other) sum += sum_of[other];
    args.scales.Write(largest / 127.0f, token, g);
    args.sums.Write((float)sum, token, g);
  }
)";

}  // namespace

KernelDescription quantize_rows(std::int64_t columns, Element given) {
  const std::int64_t groups = q4nx::groups_of(columns);
  const std::string tokens = "tokens";
  return {.name = "quantize_rows",
          .body = kBody,
          .tensors = {{.name = "x", .element = given, .sizes = {tokens, columns}},
                      {.name = "codes",
                       .element = Element::kInt8,
                       .access = Access::kWrite,
                       .sizes = {tokens, groups * q4nx::kGroup}},
                      {.name = "scales", .access = Access::kWrite, .sizes = {tokens, groups}},
                      {.name = "sums", .access = Access::kWrite, .sizes = {tokens, groups}}},
          .constants = {{"columns", columns},
                        {"groups", groups},
                        {"negligible", 127.0F / std::numeric_limits<float>::max()}},
          .lanes = kLanes};
}

Grid quantize_rows_grid(std::int64_t columns, std::int64_t tokens) {
  return {.groups = {q4nx::ceil_div(q4nx::groups_of(columns), kGroups), tokens, 1},
          .lanes = kLanes};
}

}  // namespace flownpu::gpu
