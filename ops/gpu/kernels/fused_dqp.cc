// SPDX-License-Identifier: Apache-2.0
// FusedDQP (Gemma3 paper, equation 15; ML Drift's fully connected layer of the decode stage): a
// work-group computes 32 results, one row of blocks. A lane has one column of a strip in each group
// that falls to it, so that neighbours read neighbouring bytes, and 16 sums. Of several teams of
// lanes each has every so many-th group. The lanes' sums are added in their order.
#include <algorithm>

#include "ops/gpu/kernels/product.h"

namespace flownpu::gpu {
namespace {

// Lanes of a team: two strips of 32 columns, a group of a row of blocks.
constexpr std::int64_t kLanes = 64;
// So many teams are 256 lanes, which every GPU takes in a work-group.
constexpr std::int64_t kMostTeams = 4;
// Teams that a compute unit chooses from while others wait for memory.
constexpr std::int64_t kTeamsOfUnit = 4;

constexpr const char* kBody = R"(
  const int block = group(0);
  const int token = group(1);
  const int team = lane() / 64;
  const int strip = lane() % 64 / 32;
  const int column = lane() % 32;
  shared float sums[args.lanes * 16];
  float product[args.parts];
  for (int part = 0; part < args.parts; ++part) {
    const int row = (block + part * args.row_blocks) * 32 + strip * 16;
    float8 sum[2] = {(float8)(0.0f), (float8)(0.0f)};
    for (int g = team; g < args.groups; g += args.teams) {
      const int k = g * 32 + column;
      if (k < args.columns) {
        const float x = args.x.Read(token, k);
        for (int octet = 0; octet < 2; ++octet) {
          const int of_octet = row + octet * 8;
          sum[octet] += x * (args.w.Minima(of_octet, g) +
                            args.w.Scales(of_octet, g) * args.w.Codes(of_octet, k));
        }
      }
    }
    for (int octet = 0; octet < 2; ++octet) vstore8(sum[octet], lane() * 2 + octet, sums);
    synchronise();
    product[part] = 0.0f;
    if (lane() < 32) {
      for (int of_team = 0; of_team < args.teams; ++of_team) {
        const int first = of_team * 64 + lane() / 16 * 32;
        for (int other = 0; other < 32; ++other)
          product[part] += sums[(first + other) * 16 + lane() % 16];
      }
    }
    synchronise();
  }
  const int m = block * 32 + lane();
  if (lane() < 32 && m < args.rows) {
    args.y.Write(RESULT, token, m);
  }
)";

}  // namespace

KernelDescription fused_dqp(const ProductShape& shape) {
  std::string body = kBody;
  const std::string result = "RESULT";
  body.replace(body.find(result), result.size(), gated(shape, "product[0]", "product[1]"));
  KernelDescription kernel{.name = "fused_dqp",
                           .body = body,
                           .tensors = {{.name = "x",
                                        .element = shape.given,
                                        .sizes = {std::string("tokens"), shape.columns}},
                                       weight_of(shape),
                                       result_of(shape)},
                           .constants = {{"rows", shape.rows},
                                         {"columns", shape.columns},
                                         {"groups", q4nx::groups_of(shape.columns)},
                                         {"row_blocks", q4nx::row_blocks(shape.rows)},
                                         {"parts", parts_of(shape)},
                                         {"teams", shape.teams}},
                           .lanes = kLanes * shape.teams};
  link_addends(shape, kernel);
  return kernel;
}

Grid fused_dqp_grid(const ProductShape& shape, std::int64_t tokens) {
  return {.groups = {q4nx::row_blocks(shape.rows), tokens, 1}, .lanes = kLanes * shape.teams};
}

std::vector<std::int64_t> teams_for(const ProductShape& shape, const DeviceFacts& facts) {
  constexpr std::int64_t kBytes = kLanes * q4nx::kStripRows * sizeof(float);  // of a team's sums
  const std::int64_t most = std::min({kMostTeams, facts.work_group / kLanes,
                                      q4nx::groups_of(shape.columns), facts.local_memory / kBytes});
  const std::int64_t wanted =
      q4nx::ceil_div(kTeamsOfUnit * facts.compute_units, q4nx::row_blocks(shape.rows));
  std::vector<std::int64_t> teams{1};
  while (teams.back() * 2 <= most) teams.push_back(teams.back() * 2);
  const auto best = std::ranges::upper_bound(teams, std::max<std::int64_t>(wanted, 1)) - 1;
  std::rotate(teams.begin(), best, best + 1);
  return teams;
}

}  // namespace flownpu::gpu
