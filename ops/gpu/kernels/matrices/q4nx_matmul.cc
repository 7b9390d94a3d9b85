// SPDX-License-Identifier: Apache-2.0
// Q4NXMatMul of activations that quantize_rows rounded, by matrix units. A work-group computes 64
// rows for 64 tokens, in steps of 64 columns: its lanes unpack the weight's blocks and the
// activations into the work-group's memory as float16, then each subgroup multiplies matrices of
// both and adds to sums, which stay in its registers until all columns are done. Behind that, they
// pass through the work-group's memory, because only the driver knows which lane has which element.
//
// Units add over all columns, so that a token's groups need one scale. Codes are multiplied by
// their group's scale over the token's largest, times 256: then a rounding below float16's smallest
// normal number is below 2^-14 / (127 x 256) of the token's largest value, and no value is above
// 127 x 256, of the 65504 that float16 holds.
//
// Errors: rounding a factor to float16, which may be to either neighbour, changes it by at most
// 2^-10 of its magnitude, and both factors so change a product by 2^-9. Weights of more than 65504
// or less than 2^-14 are not to be expected: they are a 4-bit code's 2^-4 to 2^0 of a scale.
//
// In the work-group's memory, with rows of 64 float16 in 32 words, padded to 36 as in q4nx_matmul:
//     weights [64 rows, 36], given [64 tokens, 36] uint; scratch [subgroups, rows columns of a sum]
//     float, of each part; 19 KiB and up to 8 more.
#include "ops/gpu/kernels/matrices/q4nx_matmul.h"

#include <algorithm>
#include <utility>

#include "ops/gpu/kernels/pieces.h"
#include "ops/gpu/kernels/product.h"
#include "ops/gpu/language/text.h"

namespace flownpu::gpu {
namespace {

constexpr std::int64_t kTile = kMatricesTile;  // rows, tokens, and columns of a step
constexpr std::int64_t kBlocks = kTile / q4nx::kBlockRows;
constexpr std::int64_t kLanes = 128;
constexpr std::int64_t kWords = 36;

// How a work-group's subgroups share its tile: `over` beside one another along rows, and the others
// along tokens. Each has sums [rows, tokens], counted in matrices.
struct Shares {
  std::int64_t over = 1;
  std::int64_t rows = 0;
  std::int64_t tokens = 0;
};

Shares shares_of(const MatrixUnits& units) {
  Shares shares{.rows = kTile / units.rows, .tokens = kTile / units.columns};
  for (std::int64_t left = kLanes / units.lanes; left > 1; left /= 2) {
    const bool halves_rows = shares.rows >= shares.tokens;
    if (halves_rows) shares.over *= 2;
    (halves_rows ? shares.rows : shares.tokens) /= 2;
  }
  return shares;
}

std::int64_t scratch_of(const MatrixUnits& units) {
  return kLanes / units.lanes * units.rows * units.columns;
}

constexpr const char* kBody = R"(
  FIRST
  const int is_odd = lane() / 64;
  const int strip = lane() / 16 % 4;
  const int of_step = lane() / 8 % 2;
  const int quad = lane() % 8;
  const int rows_of_subgroup = subgroup() % args.over * args.each_rows * args.m;
  const int tokens_of_subgroup = subgroup() / args.over * args.each_tokens * args.n;
  shared uint weights[64 * args.stride];
  shared uint given[64 * args.stride];
  shared float scratch[args.parts * args.scratch];
  shared float largest_of[128];
  shared float inverse_of[64];
  float largest = 0.0f;
  for (int g = lane() % 2; g < args.groups; g += 16) {
    unrolled for (int i = 0; i < 8; ++i) {
      const int of_largest = lane() / 2;
      const int token = TOKEN_OF(of_largest);
      const float scale = args.scales.Read(token, min(g + i * 2, args.groups - 1));
      largest = isnan(largest) || scale <= largest ? largest : scale;
    }
  }
  largest_of[lane()] = largest;
  synchronise();
  if (lane() < 64) {
    const float a = largest_of[lane() * 2];
    const float b = largest_of[lane() * 2 + 1];
    largest = isnan(a) || b <= a ? a : b;
    inverse_of[lane()] = largest > args.negligible ? 256.0f / largest : 0.0f;
  }
  synchronise();
  if (lane() < 64) largest_of[lane()] = largest / 256.0f;
  SWEEPS
  RESULTS
)";

// One part of the weight times all columns. The subgroup's sums are sum_PART_ROW_TOKEN.
constexpr const char* kSweep = R"(
  SUMS
  for (int step = 0; step < GROUPS; step += 2) {
    const int g = min(step + of_step, args.groups - 1);
    const int block = group(0) * 2 + strip / 2;
    const int row = (BLOCKS min(block, args.row_blocks - 1) + PART * args.row_blocks) * 32 + strip % 2 * 16;
    const float8 scales = is_odd ? (float8)(args.w.Scales(row, g).odd, args.w.Scales(row + 8, g).odd)
                                 : (float8)(args.w.Scales(row, g).even, args.w.Scales(row + 8, g).even);
    const float8 minima = is_odd ? (float8)(args.w.Minima(row, g).odd, args.w.Minima(row + 8, g).odd)
                                 : (float8)(args.w.Minima(row, g).even, args.w.Minima(row + 8, g).even);
    const uint8 codes = is_odd ? args.w.OddCodes(row, g * 32 + quad * 4)
                               : args.w.EvenCodes(row, g * 32 + quad * 4);
    const int place = (strip * 16 + is_odd) * args.stride + of_step * 16 + quad * 2;
    UNPACK
    for (int i = lane(); i < 64 * 16; i += args.lanes) {
      const int token = TOKEN_OF(i / 16);
      const int of_token = min(step + i % 16 / 8, args.groups - 1);
      const float4 four = convert_float4(args.x.Read4(token, of_token * 32 + i % 8 * 4));
      const float scale = step + i % 16 / 8 < args.groups
          ? args.scales.Read(token, of_token) * inverse_of[i / 16] : 0.0f;
      given[i / 16 * args.stride + i % 16 * 2] = halves(scale * four.x, scale * four.y);
      given[i / 16 * args.stride + i % 16 * 2 + 1] = halves(scale * four.z, scale * four.w);
    }
    synchronise();
    for (int k = 0; k < 64; k += args.depth) {
      MULTIPLY
    }
    synchronise();
  }
)";

constexpr const char* kUnpack = R"(
    const float4 codes_ROW = convert_float4(as_char4(codes.sROW));
    weights[place + ROW * 2 * args.stride] =
        halves(minima.sROW + scales.sROW * codes_ROW.x, minima.sROW + scales.sROW * codes_ROW.y);
    weights[place + ROW * 2 * args.stride + 1] =
        halves(minima.sROW + scales.sROW * codes_ROW.z, minima.sROW + scales.sROW * codes_ROW.w);
)";

// One sum of each subgroup: STORE puts those of all parts into the scratch.
constexpr const char* kResult = R"(
  STORE
  synchronise();
  for (int i = lane(); i < args.scratch; i += args.lanes) {
    const int of = i / (args.m * args.n);
    const int row = (of % args.over * args.each_rows + ROW) * args.m + i % args.m;
    const int token = (of / args.over * args.each_tokens + TOKEN) * args.n + i / args.m % args.n;
    const int m = group(0) * 64 + row;
    if (WITHIN(token) && m < args.rows) {
      const float scale = largest_of[token];
      const float gate = scratch[i] * scale;
      const float up = scratch[(args.parts - 1) * args.scratch + i] * scale;
      args.y.Write(RESULT, PLACE_OF(token), m);
    }
  }
  synchronise();
)";

std::string sum_name(std::int64_t part, std::int64_t row, std::int64_t token) {
  return text_of("sum_", part, "_", row, "_", token);
}

std::string sweep_of(std::int64_t part, const Shares& shares) {
  std::string sums;
  std::string unpack;
  std::string multiply;
  for (std::int64_t row = 0; row < q4nx::kStripRows / 2; ++row)
    unpack += replaced(kUnpack, "ROW", std::to_string(row));
  for (std::int64_t token = 0; token < shares.tokens; ++token)
    multiply +=
        text_of("const right_matrix right_", token, " = right_from(given, (tokens_of_subgroup + ",
                token, " * args.n) * args.stride + k / 2, args.stride);\n      ");
  for (std::int64_t row = 0; row < shares.rows; ++row) {
    multiply +=
        text_of("const left_matrix left_", row, " = left_from(weights, (rows_of_subgroup + ", row,
                " * args.m) * args.stride + k / 2, args.stride);\n      ");
    for (std::int64_t token = 0; token < shares.tokens; ++token) {
      const std::string sum = sum_name(part, row, token);
      sums += text_of("sum_matrix ", sum, " = matrix_of(0.0f);\n  ");
      multiply +=
          text_of(sum, " = multiplied(left_", row, ", right_", token, ", ", sum, ");\n      ");
    }
  }
  return replaced(
      kSweep,
      {{"SUMS", sums}, {"UNPACK", unpack}, {"MULTIPLY", multiply}, {"PART", std::to_string(part)}});
}

std::string results_of(const ProductShape& shape, const Shares& shares) {
  std::string text;
  for (std::int64_t row = 0; row < shares.rows; ++row)
    for (std::int64_t token = 0; token < shares.tokens; ++token) {
      std::string store;
      for (std::int64_t part = 0; part < parts_of(shape); ++part)
        store += text_of("to_array(", sum_name(part, row, token), ", scratch, ", part,
                         " * args.scratch + subgroup() * (args.m * args.n), args.m);\n  ");
      text += replaced(kResult, {{"STORE", store},
                                 {"ROW", std::to_string(row)},
                                 {"TOKEN", std::to_string(token)},
                                 {"RESULT", gated(shape, "gate", "up")}});
    }
  return text;
}

}  // namespace

bool can_multiply(const MatrixUnits& units, const ProductShape& shape, const DeviceFacts& facts) {
  const auto divides = [](std::int64_t size, std::int64_t whole) {
    return size > 0 && whole % size == 0;
  };
  if (!divides(units.rows, kTile) || !divides(units.columns, kTile) ||
      !divides(units.depth, kTile) || !divides(units.lanes, kLanes))
    return false;
  const Shares shares = shares_of(units);
  constexpr std::int64_t kOthers = 2 * kTile * kWords + kLanes + 2 * kTile;
  const std::int64_t floats = kOthers + parts_of(shape) * scratch_of(units);
  return shares.rows > 0 && shares.tokens > 0 && facts.work_group >= kLanes &&
         floats * static_cast<std::int64_t>(sizeof(float)) <= facts.local_memory;
}

KernelDescription q4nx_matmul_of_matrices(const ProductShape& shape, const MatrixUnits& units) {
  KernelDescription kernel = q4nx_matmul(shape);
  const Shares shares = shares_of(units);
  std::string sweeps;
  for (std::int64_t part = 0; part < parts_of(shape); ++part) sweeps += sweep_of(part, shares);
  kernel.name = "q4nx_matmul_of_matrices";
  kernel.body =
      in_tiles(shape, kMatricesTile,
               replaced(kBody, {{"SWEEPS", sweeps}, {"RESULTS", results_of(shape, shares)}}));
  // Below it 256 / largest would be infinite.
  constexpr float kNegligible = 0x1p-119F;
  kernel.constants.insert({{"m", units.rows},
                           {"n", units.columns},
                           {"depth", units.depth},
                           {"over", shares.over},
                           {"each_rows", shares.rows},
                           {"each_tokens", shares.tokens},
                           {"stride", kWords},
                           {"scratch", scratch_of(units)},
                           {"negligible", kNegligible}});
  kernel.lanes = kLanes;
  kernel.matrices = units;
  return kernel;
}

Grid q4nx_matmul_of_matrices_grid(const ProductShape& shape, std::int64_t tokens) {
  return {.groups = {q4nx::ceil_div(q4nx::row_blocks(shape.rows), kBlocks),
                     q4nx::ceil_div(tokens, kTile), 1},
          .lanes = kLanes};
}

}  // namespace flownpu::gpu
