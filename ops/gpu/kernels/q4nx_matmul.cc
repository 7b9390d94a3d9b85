// SPDX-License-Identifier: Apache-2.0
// Q4NXMatMul of activations that quantize_rows rounded: a work-group computes 64 results, of two
// rows of blocks, for each of 32 tokens. It goes along the columns in steps of 4 groups. In each
// step every lane unpacks 4 columns of a strip's group into the work-group's memory, row by row,
// and copies 8 words of activations there (a word is 4 columns). Then, for each group, it computes
// 4 rows times 4 tokens: 128 dot products of 4 columns for 16 reads of 4 words. A group's dot
// product is an exact integer, which is scaled and added to a float:
//     sum += scale_x (scale_w dot(codes_w, codes_x) + minimum_w sum(codes_x))
// A row of a step is 32 words, padded to 36, so that the 8 rows from which neighbouring lanes read
// 4 words at once lie in different banks, of which there are 32. A lane's rows are 16 apart and its
// tokens 8, so that neighbouring lanes read and write neighbouring rows. In the work-group's
// memory:
//     codes [64 rows, 36], given [32 tokens, 36] int; scales, minima [4 groups, 64 rows],
//     of_tokens, totals [4 groups, 32 tokens] float: 16.5 KiB of the 32 that OpenCL promises.
#include <utility>

#include "ops/gpu/kernels/pieces.h"
#include "ops/gpu/kernels/product.h"
#include "ops/gpu/language/text.h"

namespace flownpu::gpu {
namespace {

// Rows of blocks of a work-group. Its lanes are 4 strips x 4 groups x 8 times 4 columns,
// which is how they unpack a step.
constexpr std::int64_t kBlocks = 2;
constexpr std::int64_t kLanes = 128;

constexpr const char* kBody = R"(
  FIRST
  const int strip = lane() / 32;
  const int of_step = lane() / 8 % 4;
  const int quad = lane() % 8;
  const int of_rows = lane() % 16;
  const int of_tile = lane() / 16;
  shared int4 codes[64 * 9];
  shared int4 given[32 * 9];
  shared float scales[4 * 64];
  shared float minima[4 * 64];
  shared float of_tokens[4 * 32];
  shared float totals[4 * 32];
  float product[args.parts][4][4];
  unrolled for (int part = 0; part < args.parts; ++part) {
    const int block = group(0) * 2 + strip / 2;
    const int row = (BLOCKS min(block, args.row_blocks - 1) + part * args.row_blocks) * 32 + strip % 2 * 16;
    unrolled for (int r = 0; r < 4; ++r)
      unrolled for (int t = 0; t < 4; ++t) product[part][r][t] = 0.0f;
    for (int step = 0; step < GROUPS; step += 4) {
      const int g = min(step + of_step, args.groups - 1);
      const uint8 evens = args.w.EvenCodes(row, g * 32 + quad * 4);
      const uint8 odds = args.w.OddCodes(row, g * 32 + quad * 4);
      shared uint* unpacked = (shared uint*)codes + strip * 16 * 36 + of_step * 8 + quad;
      unrolled for (int side = 0; side < 2; ++side) {
        const uint4 even = side == 0 ? evens.lo : evens.hi;
        const uint4 odd = side == 0 ? odds.lo : odds.hi;
        shared uint* of_side = unpacked + side * 8 * 36;
        of_side[0] = even.x;
        of_side[36] = odd.x;
        of_side[72] = even.y;
        of_side[108] = odd.y;
        of_side[144] = even.z;
        of_side[180] = odd.z;
        of_side[216] = even.w;
        of_side[252] = odd.w;
      }
      for (int r = lane() % 8; r < 16; r += 8) {
        scales[of_step * 64 + strip * 16 + r] = args.w.Scale(row + r, g);
        minima[of_step * 64 + strip * 16 + r] = args.w.Minimum(row + r, g);
      }
      for (int i = lane(); i < 32 * 32; i += args.lanes) {
        const int token = TOKEN_OF(i / 32);
        const int k = min(step * 8 + i % 32, args.groups * 8 - 1) * 4;
        ((shared int*)given)[i / 32 * 36 + i % 32] = as_int(args.x.Read4(token, k));
      }
      const int at_token = lane() % 32;
      const int token = TOKEN_OF(at_token);
      const int g_of_token = step + lane() / 32;
      of_tokens[lane()] =
          g_of_token < args.groups ? args.scales.Read(token, min(g_of_token, args.groups - 1)) : 0.0f;
      totals[lane()] = args.sums.Read(token, min(g_of_token, args.groups - 1));
      synchronise();
      for (int one = 0; one < 4 && step + one < args.groups; ++one) {
        int4 of_token[4][2];
        unrolled for (int t = 0; t < 4; ++t)
          unrolled for (int side = 0; side < 2; ++side)
            of_token[t][side] = given[(of_tile + t * 8) * 9 + one * 2 + side];
        unrolled for (int r = 0; r < 4; ++r) {
          const int of_block = of_rows + r * 16;
          const int4 front = codes[of_block * 9 + one * 2];
          const int4 back = codes[of_block * 9 + one * 2 + 1];
          const float scale = scales[one * 64 + of_block];
          const float minimum = minima[one * 64 + of_block];
          unrolled for (int t = 0; t < 4; ++t) {
            const int dot = DOTS;
            const int at = one * 32 + of_tile + t * 8;
            product[part][r][t] += of_tokens[at] * (scale * (float)dot + minimum * totals[at]);
          }
        }
      }
      synchronise();
    }
  }
  unrolled for (int r = 0; r < 4; ++r) {
    const int m = group(0) * 64 + of_rows + r * 16;
    unrolled for (int t = 0; t < 4; ++t) {
      if (WITHIN(of_tile + t * 8) && m < args.rows) {
        args.y.Write(RESULT, PLACE_OF(of_tile + t * 8), m);
      }
    }
  }
)";

// 8 dot products of 4 columns, each added to the one before it.
std::string dots() {
  std::string sum = "0";
  for (const auto& [half, which] : {std::pair("front", "[0]"), {"back", "[1]"}})
    for (const char* word : {".x", ".y", ".z", ".w"})
      sum = text_of("dot4(as_char4(", half, word, "), as_char4(of_token[t]", which, word, "), ",
                    sum, ")");
  return sum;
}

}  // namespace

KernelDescription q4nx_matmul(const ProductShape& shape) {
  const std::int64_t groups = q4nx::groups_of(shape.columns);
  const std::string tokens = "tokens";
  KernelDescription kernel{
      .name = "q4nx_matmul",
      .body = in_tiles(
          shape, kMatmulTile,
          replaced(kBody, {{"RESULT", gated(shape, "product[0][r][t]", "product[1][r][t]")},
                           {"DOTS", dots()}})),
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
                    {"parts", parts_of(shape)}},
      .parameters = {tokens},
      .lanes = kLanes};
  add_experts(shape,
              {{.name = "order", .element = Element::kInt32, .sizes = {tokens}},
               {.name = "tiles",
                .element = Element::kInt32,
                .sizes = {std::string("tiles"), std::int64_t{3}}}},
              kernel);
  link_addends(shape, kernel);
  return kernel;
}

Grid q4nx_matmul_grid(const ProductShape& shape, std::int64_t tokens) {
  return {.groups = {q4nx::ceil_div(q4nx::row_blocks(shape.rows), kBlocks),
                     q4nx::ceil_div(tokens, kMatmulTile), 1},
          .lanes = kLanes};
}

}  // namespace flownpu::gpu
