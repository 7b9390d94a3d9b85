// SPDX-License-Identifier: Apache-2.0
// Q4NXMatMul of activations that quantize_rows rounded: a work-group computes 32 results for each
// of 16 rows. Its lanes unpack a block's codes into their own memory, row by row, where dots of
// four columns are read at once; a group's dot is an exact integer, scaled into a float sum:
//     sum += scale_x (scale_w dot(codes_w, codes_x) + minimum_w sum(codes_x))
#include "ops/gpu/kernels/product.h"

namespace flownpu::gpu {
namespace {

constexpr std::int64_t kLanes = 64;
constexpr std::int64_t kTile = 16;
// A lane has one result of every second row.
constexpr std::int64_t kEach = kTile * q4nx::kBlockRows / kLanes;

constexpr const char* kBody = R"(
  const int block = group(0);
  const int first = group(1) * args.tile + lane() / 32;
  const int strip = lane() / 32;
  const int column = lane() % 32;
  shared char codes[32 * 32];
  float product[args.parts][args.each];
  for (int part = 0; part < args.parts; ++part) {
    const int of_blocks = (block + part * args.row_blocks) * 32;
    const int row = of_blocks + lane() % 32;
    for (int t = 0; t < args.each; ++t) product[part][t] = 0.0f;
    for (int g = 0; g < args.groups; ++g) {
      char unpacked[16];
      for (int octet = 0; octet < 2; ++octet)
        vstore8(args.w.ByteCodes(of_blocks + strip * 16 + octet * 8, g * 32 + column), octet, unpacked);
      for (int r = 0; r < 16; ++r) codes[(strip * 16 + r) * 32 + column] = unpacked[r];
      synchronise();
      const float scale = args.w.Scale(row, g);
      const float minimum = args.w.Minimum(row, g);
      for (int t = 0; t < args.each; ++t) {
        const int token = first + 2 * t;
        if (token < args.tokens) {
          int dot = 0;
          for (int q = 0; q < 8; ++q)
            dot = dot4(vload4(lane() % 32 * 8 + q, codes), args.x.Read4(token, g * 32 + q * 4), dot);
          product[part][t] += args.scales.Read(token, g) *
                              (scale * (float)dot + minimum * args.sums.Read(token, g));
        }
      }
      synchronise();
    }
  }
  const int m = block * 32 + lane() % 32;
  for (int t = 0; t < args.each; ++t) {
    const int token = first + 2 * t;
    if (token < args.tokens && m < args.rows) {
      args.y.Write(RESULT, token, m);
    }
  }
)";

}  // namespace

KernelDescription q4nx_matmul(const ProductShape& shape) {
  std::string body = kBody;
  const std::string result = "RESULT";
  body.replace(body.find(result), result.size(), gated(shape, "product[0][t]", "product[1][t]"));
  const std::int64_t groups = q4nx::groups_of(shape.columns);
  const std::string tokens = "tokens";
  KernelDescription kernel{.name = "q4nx_matmul",
                           .body = body,
                           .tensors = {{.name = "x",
                                        .element = Element::kInt8,
                                        .sizes = {tokens, groups * q4nx::kGroup}},
                                       {.name = "scales", .sizes = {tokens, groups}},
                                       {.name = "sums", .sizes = {tokens, groups}},
                                       weight_of(shape),
                                       result_of(shape)},
                           .constants = {{"rows", shape.rows},
                                         {"groups", groups},
                                         {"row_blocks", q4nx::row_blocks(shape.rows)},
                                         {"parts", parts_of(shape)},
                                         {"tile", kTile},
                                         {"each", kEach}},
                           .parameters = {tokens},
                           .lanes = kLanes};
  link_addends(shape, kernel);
  return kernel;
}

Grid q4nx_matmul_grid(const ProductShape& shape, std::int64_t tokens) {
  return {.groups = {q4nx::row_blocks(shape.rows), q4nx::ceil_div(tokens, kTile), 1},
          .lanes = kLanes};
}

}  // namespace flownpu::gpu
