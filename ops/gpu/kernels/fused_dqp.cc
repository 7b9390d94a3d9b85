// SPDX-License-Identifier: Apache-2.0
// FusedDQP (Gemma3 paper, equation 15; ML Drift's fully connected layer of the decode stage): a
// work-group computes 16 results, those of a strip. Eight lanes share a group of 32 columns, 4 for
// each, so that neighbouring lanes read neighbouring bytes, 32 each. The scales and minima of the
// strip's rows, 64 bytes of a block, then serve 64 codes of a lane; with a column a lane they would
// serve 16. Unpacking and multiplying a code takes some 3 operations, the parameters some 7 for
// each row.
//     of_row = x0 code0 + .. + x3 code3;    sum += scale of_row + minimum (x0 + .. + x3)
// Two neighbouring rows share bytes, or of 8 bits lie apart, so even and odd rows are summed in
// vectors of their own. The
// lanes' sums go through the work-group's memory, [row][lane]. A row there is one float longer than
// there are lanes, so that writing and reading both use all banks. The order in which sums are
// added depends on the sizes only.
//
// With a norm every work-group computes the row's RMS norm for itself, before it multiplies: it
// reads the row, some KiB, from a cache once more, and a token has one kernel less that waits for
// another.
#include <algorithm>
#include <string>
#include <utility>

#include "ops/gpu/kernels/pieces.h"
#include "ops/gpu/kernels/product.h"
#include "ops/gpu/language/text.h"

namespace flownpu::gpu {
namespace {

// Lanes of a team. They have eight groups of a row of blocks at a time.
constexpr std::int64_t kLanes = 64;
constexpr std::int64_t kGroupsOfTeam = 8;
// The most teams: 256 lanes, which every GPU takes in a work-group.
constexpr std::int64_t kMostTeams = 4;
// Teams for each compute unit, so that some can compute while others wait for memory.
constexpr std::int64_t kTeamsOfUnit = 4;

constexpr const char* kBody = R"(
  const int strip = group(0);
  const int token = group(1);
  EXPERT
  const int column = lane() % 8 * 4;
  shared float sums[16 * (args.lanes + 1)];
  NORM
  float8 even[args.parts];
  float8 odd[args.parts];
  unrolled for (int part = 0; part < args.parts; ++part) {
    even[part] = (float8)(0.0f);
    odd[part] = (float8)(0.0f);
  }
  for (int g = lane() / 8; g < args.groups; g += args.lanes / 8) {
    const int k = g * 32 + column;
    float x[4];
    READ
    const float total = (x[0] + x[1]) + (x[2] + x[3]);
    unrolled for (int part = 0; part < args.parts; ++part) {
      const int row = (BLOCKS strip / 2 + part * args.row_blocks) * 32 + strip % 2 * 16;
      float8 of_even = (float8)(0.0f);
      float8 of_odd = (float8)(0.0f);
      DOTS
      const float8 scales = args.w.Scales(row, g);
      const float8 more_scales = args.w.Scales(row + 8, g);
      const float8 minima = args.w.Minima(row, g);
      const float8 more_minima = args.w.Minima(row + 8, g);
      even[part] += total * (float8)(minima.even, more_minima.even) +
                    (float8)(scales.even, more_scales.even) * of_even;
      odd[part] += total * (float8)(minima.odd, more_minima.odd) +
                   (float8)(scales.odd, more_scales.odd) * of_odd;
    }
  }
  float product[args.parts];
  unrolled for (int part = 0; part < args.parts; ++part) {
    float of_rows[16];
    vstore8(even[part], 0, of_rows);
    vstore8(odd[part], 1, of_rows);
    unrolled for (int r = 0; r < 16; ++r)
      sums[(r % 8 * 2 + r / 8) * (args.lanes + 1) + lane()] = of_rows[r];
    synchronise();
    const int of_strip = lane() % 16;
    float sum = 0.0f;
    for (int other = lane() / 16; other < args.lanes; other += args.lanes / 16)
      sum += sums[of_strip * (args.lanes + 1) + other];
    synchronise();
    sums[lane()] = sum;
    synchronise();
    product[part] = 0.0f;
    for (int other = of_strip; other < args.lanes; other += 16) product[part] += sums[other];
    synchronise();
  }
  const int m = strip * 16 + lane();
  if (lane() < 16 && m < args.rows) {
    args.y.Write(RESULT, token, m);
  }
)";

constexpr const char* kExpert = R"(
  const int expert = args.chosen.Read(token);
  const int blocks = expert * args.parts * args.row_blocks;
)";

// READ: elements k to k + 3 of x, at once if the number of columns is a multiple of 4.
constexpr const char* kReadEach = R"(
    unrolled for (int i = 0; i < 4; ++i) x[i] = k + i < args.columns ? ELEMENT : 0.0f;
)";
constexpr const char* kReadFour = R"(
    float4 four = (float4)(0.0f);
    if (k < args.columns) four = ELEMENT;
    x[0] = four.x;
    x[1] = four.y;
    x[2] = four.z;
    x[3] = four.w;
)";

constexpr const char* kDotsOfNibbles = R"(
      unrolled for (int pair = 0; pair < 2; ++pair) {
        const uchar16 codes = as_uchar16(args.w.CodePairs(row, k + pair * 2));
        const uchar16 low = codes & (uchar16)(15);
        const uchar16 high = codes >> (uchar16)(4);
        of_even += x[pair * 2] * convert_float8(low.lo) + x[pair * 2 + 1] * convert_float8(low.hi);
        of_odd += x[pair * 2] * convert_float8(high.lo) + x[pair * 2 + 1] * convert_float8(high.hi);
      })";

// The same for int8 values, which come four columns at a time.
std::string dots_of_bytes() {
  std::string text;
  for (const auto& [sum, codes] : {std::pair("of_even", "EvenCodes"), {"of_odd", "OddCodes"}}) {
    text += text_of("{ const uint8 words = args.w.", codes, "(row, k); ",
                    "const char16 front = as_char16(words.lo); ",
                    "const char16 back = as_char16(words.hi); ");
    int column = 0;
    for (const char* bytes : {".s048c", ".s159d", ".s26ae", ".s37bf"}) {
      text += text_of(sum, " += x[", column++, "] * (float8)(convert_float4(front", bytes,
                      "), convert_float4(back", bytes, ")); ");
    }
    text += "} ";
  }
  return text;
}

std::string read_of(const ProductShape& shape) {
  const bool is_four = shape.columns % 4 == 0;
  const std::string word = is_four ? "ReadFloats" : "Read";
  const std::string k = is_four ? "k" : "k + i";
  return replaced(
      is_four ? kReadFour : kReadEach, "ELEMENT",
      shape.norm
          ? normalised(*shape.norm, "row", word, k)
          : text_of("args.x.", word, shape.experts ? "(token / args.share, " : "(token, ", k, ")"));
}

// The first work-group of a token writes the sum.
std::string norm_of(const ProductShape& shape) {
  if (!shape.norm) return "";
  return "const int row = token;\n  shared float sixteenths[16];" +
         norm_of_row(*shape.norm, "row", "strip == 0");
}

std::int64_t strips_of(const ProductShape& shape) {
  return q4nx::ceil_div(shape.rows, q4nx::kStripRows);
}

}  // namespace

KernelDescription fused_dqp(const ProductShape& shape) {
  KernelDescription kernel{
      .name = "fused_dqp",
      .body =
          replaced(kBody, {{"RESULT", gated(shape, "product[0]", "product[1]")},
                           {"EXPERT", shape.experts ? kExpert : ""},
                           {"BLOCKS", shape.experts ? "blocks +" : ""},
                           {"NORM", norm_of(shape)},
                           {"READ", read_of(shape)},
                           {"DOTS", shape.layout.is_signed() ? dots_of_bytes() : kDotsOfNibbles}}),
      .tensors = {{.name = "x",
                   .element = shape.given,
                   .sizes = {std::string("tokens"), shape.columns}},
                  weight_of(shape),
                  result_of(shape)},
      .constants = {{"rows", shape.rows},
                    {"columns", shape.columns},
                    {"groups", q4nx::groups_of(shape.columns)},
                    {"row_blocks", q4nx::row_blocks(shape.rows)},
                    {"parts", parts_of(shape)}},
      .lanes = kLanes * shape.teams};
  if (shape.norm) {
    kernel.constants["epsilon"] = shape.norm->epsilon;
    kernel.tensors.push_back({.name = "weight", .sizes = {shape.columns}});
    add_skip(*shape.norm, kernel);
  }
  add_experts(shape,
              {{.name = "chosen", .element = Element::kInt32, .sizes = {std::string("tokens")}}},
              kernel);
  link_addends(shape, kernel);
  return kernel;
}

Grid fused_dqp_grid(const ProductShape& shape, std::int64_t tokens) {
  return {.groups = {strips_of(shape), tokens, 1}, .lanes = kLanes * shape.teams};
}

std::vector<std::int64_t> teams_for(const ProductShape& shape, const DeviceFacts& facts) {
  // Bytes of a team's sums, with the float by which a row is longer.
  constexpr std::int64_t kBytes = (kLanes + 1) * q4nx::kStripRows * sizeof(float);
  constexpr std::int64_t kBytesOfNorm = 16 * sizeof(float);
  const std::int64_t most = std::min({kMostTeams, facts.work_group / kLanes,
                                      q4nx::ceil_div(q4nx::groups_of(shape.columns), kGroupsOfTeam),
                                      (facts.local_memory - kBytesOfNorm) / kBytes});
  const std::int64_t wanted = q4nx::ceil_div(kTeamsOfUnit * facts.compute_units, strips_of(shape));
  std::vector<std::int64_t> teams{1};
  while (teams.back() * 2 <= most) teams.push_back(teams.back() * 2);
  const auto best = std::ranges::upper_bound(teams, std::max<std::int64_t>(wanted, 1)) - 1;
  std::rotate(teams.begin(), best, best + 1);
  return teams;
}

}  // namespace flownpu::gpu
