// SPDX-License-Identifier: Apache-2.0
// Activations to int8, as ML Drift's prefill has it: a kernel of its own, before the product. A
// lane has one group of 32 columns: x = scale * integer, integer = x * (127 / largest) to the
// nearest, as on the CPU. The sum of a group's integers is what the weight's minimum is multiplied
// by.
#include <limits>

#include "ops/gpu/kernels/kernels.h"

namespace flownpu::gpu {
namespace {

constexpr std::int64_t kLanes = 64;

// Up to `negligible`, 127 / largest would be infinite: taken for 0. NaN stays the largest, so that
// the scale tells of it.
constexpr const char* kBody = R"(
  const int token = group(1);
  const int g = group(0) * args.lanes + lane();
  if (g < args.groups) {
    const int end = min(g * 32 + 32, args.columns);
    float largest = 0.0f;
    for (int k = g * 32; k < end; ++k) {
      const float magnitude = fabs(args.x.Read(token, k));
      largest = isnan(largest) || magnitude <= largest ? largest : magnitude;
    }
    const float inverse = largest > args.negligible ? 127.0f / largest : 0.0f;
    int sum = 0;
    for (int k = g * 32; k < g * 32 + 32; ++k) {
      const int code = k < end ? convert_char_sat_rte(args.x.Read(token, k) * inverse) : 0;
      args.codes.Write(code, token, k);
      sum += code;
    }
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
  return {.groups = {q4nx::ceil_div(q4nx::groups_of(columns), kLanes), tokens, 1}, .lanes = kLanes};
}

}  // namespace flownpu::gpu
