// SPDX-License-Identifier: Apache-2.0
// The choice of experts for each row, on the device, so that a token waits for no host. An expert's
// rank is the number of those that are better: a comparison of all pairs takes two barriers, where
// a search for each of the chosen would take several.
#include <string>
#include <vector>

#include "ops/gpu/kernels/experts/kernels.h"
#include "ops/gpu/kernels/pieces.h"

namespace flownpu::gpu {
namespace {

constexpr std::int64_t kLanes = 64;

constexpr const char* kLogits = R"(
  const int expert = group(0);
  const int row = group(1);
  shared float sums[args.lanes];
  shared float sixteenths[16];
  float sum = 0.0f;
  for (int k = lane(); k < args.hidden; k += args.lanes)
    sum += args.x.Read(row, k) * args.router.Read(expert, k);
  SUM
  if (lane() == 0) {
    args.logits.Write(sum, row, expert);
  }
)";

// WEIGHT: what shares are in proportion to; RANKED: what experts are ranked by.
constexpr const char* kChoice = R"(
  const int row = group(0);
  shared float ranked[args.experts];
  shared float weights[args.experts];
  shared int taken[args.experts];
  float largest = -INFINITY;
  for (int e = 0; e < args.experts; ++e) largest = fmax(largest, args.logits.Read(row, e));
  for (int e = lane(); e < args.experts; e += args.lanes) {
    const float logit = args.logits.Read(row, e);
    const float weight = WEIGHT;
    const float rank = RANKED;
    weights[e] = weight;
    ranked[e] = isnan(rank) ? -INFINITY : rank;
  }
  synchronise();
  for (int e = lane(); e < args.experts; e += args.lanes) {
    const float own = ranked[e];
    int better = 0;
    for (int other = 0; other < args.experts; ++other) {
      const float value = ranked[other];
      better += value > own || (value == own && other < e) ? 1 : 0;
    }
    taken[e] = better < args.per_row ? 1 : 0;
  }
  synchronise();
  float sum = 0.0f;
  for (int e = 0; e < args.experts; ++e) sum += SUMMED ? weights[e] : 0.0f;
  for (int e = lane(); e < args.experts; e += args.lanes) {
    if (taken[e] != 0) {
      int place = 0;
      for (int other = 0; other < e; ++other) place += taken[other];
      args.chosen.Write(e, row, place);
      args.shares.Write(weights[e] / sum SCALED, row, place);
    }
  }
)";

// Where tiles begin: expert e's at first / tile + e, the next one's at (first + count) / tile + e +
// 1, which is at least ceil(count / tile) behind it; what is between them are tiles without
// choices.
constexpr const char* kSort = R"(
  const int expert = group(0);
  shared int lower[args.lanes];
  shared int equal[args.lanes];
  const int each = (args.choices + args.lanes - 1) / args.lanes;
  const int begin = min(lane() * each, args.choices);
  const int end = min(begin + each, args.choices);
  int of_lower = 0;
  int of_equal = 0;
  for (int i = begin; i < end; ++i) {
    const int one = args.chosen.Read(i);
    of_lower += one < expert ? 1 : 0;
    of_equal += one == expert ? 1 : 0;
  }
  lower[lane()] = of_lower;
  equal[lane()] = of_equal;
  synchronise();
  int first = 0;
  int before = 0;
  int count = 0;
  for (int other = 0; other < args.lanes; ++other) {
    first += lower[other];
    before += other < lane() ? equal[other] : 0;
    count += equal[other];
  }
  int place = first + before;
  for (int i = begin; i < end; ++i) {
    if (args.chosen.Read(i) == expert) {
      args.order.Write(i, place);
      place += 1;
    }
  }
  const int from = first / args.tile + expert;
  const int to = (first + count) / args.tile + expert + 1;
  for (int t = from + lane(); t < to; t += args.lanes) {
    const int of_tile = first + (t - from) * args.tile;
    args.tiles.Write(expert, t, 0);
    args.tiles.Write(min(of_tile, first + count), t, 1);
    args.tiles.Write(min(of_tile + args.tile, first + count), t, 2);
  }
)";

constexpr const char* kAnswers = R"(
  const int m = group(0) * args.lanes + lane();
  const int row = group(1);
  if (m < args.hidden) {
    float sum = 0.0f;
    for (int i = 0; i < args.per_row; ++i) {
      const float answer = args.answers.Read(row * args.per_row + i, m) BIASED;
      sum += args.shares.Read(row, i) * answer;
    }
    args.y.Write(sum, row, m);
  }
)";

TensorDescription by_row(const char* name, std::int64_t columns, Access access = Access::kRead,
                         Element element = Element::kFloat32) {
  return {
      .name = name, .element = element, .access = access, .sizes = {std::string("rows"), columns}};
}

}  // namespace

KernelDescription router_logits(const RouterShape& shape) {
  KernelDescription kernel{
      .name = "router_logits",
      .body = replaced(kLogits, "SUM", over_lanes()),
      .tensors = {by_row("x", shape.hidden, Access::kRead, Element::kActivation),
                  {.name = "router",
                   .element = shape.weight,
                   .sizes = {shape.experts, shape.hidden}},
                  by_row("logits", shape.experts, Access::kWrite)},
      .constants = {{"hidden", shape.hidden}},
      .lanes = kLanes};
  if (shape.has_logits_bias)
    kernel.links["logits"].push_back({.code = "value += args.bias.Read(at1);",
                                      .tensors = {{.name = "bias", .sizes = {shape.experts}}}});
  return kernel;
}

Grid router_logits_grid(const RouterShape& shape, std::int64_t rows) {
  return {.groups = {shape.experts, rows, 1}, .lanes = kLanes};
}

KernelDescription choose_experts(const RouterShape& shape) {
  const bool over_all = !shape.normalizes && !shape.has_bias;
  KernelDescription kernel{
      .name = "choose_experts",
      .body = replaced(
          kChoice,
          {{"WEIGHT", shape.has_bias ? "0.5f + 0.5f * tanh(0.5f * logit)" : "exp(logit - largest)"},
           {"RANKED", shape.has_bias ? "weight + args.bias.Read(e)" : "logit"},
           {"SUMMED", over_all ? "e >= 0" : "taken[e] != 0"},
           {"SCALED", shape.has_scales ? "* args.scales.Read(e)" : ""}}),
      .tensors = {by_row("logits", shape.experts),
                  by_row("chosen", shape.per_row, Access::kWrite, Element::kInt32),
                  by_row("shares", shape.per_row, Access::kWrite)},
      .constants = {{"experts", shape.experts}, {"per_row", shape.per_row}},
      .lanes = kLanes};
  if (shape.has_bias) kernel.tensors.push_back({.name = "bias", .sizes = {shape.experts}});
  if (shape.has_scales) kernel.tensors.push_back({.name = "scales", .sizes = {shape.experts}});
  return kernel;
}

Grid choose_experts_grid(std::int64_t rows) { return {.groups = {rows, 1, 1}, .lanes = kLanes}; }

KernelDescription sort_by_expert(std::int64_t experts, std::int64_t tile) {
  const std::string choices = "choices";
  return {.name = "sort_by_expert",
          .body = kSort,
          .tensors = {{.name = "chosen", .element = Element::kInt32, .sizes = {choices}},
                      {.name = "order",
                       .element = Element::kInt32,
                       .access = Access::kWrite,
                       .sizes = {choices}},
                      {.name = "tiles",
                       .element = Element::kInt32,
                       .access = Access::kWrite,
                       .sizes = {std::string("all"), std::int64_t{3}}}},
          .constants = {{"experts", experts}, {"tile", tile}},
          .parameters = {choices},
          .lanes = kLanes};
}

Grid sort_by_expert_grid(std::int64_t experts) {
  return {.groups = {experts, 1, 1}, .lanes = kLanes};
}

std::int64_t tiles_of_experts(std::int64_t experts, std::int64_t choices, std::int64_t tile) {
  return choices / tile + experts;
}

KernelDescription sum_of_answers(const AnswersShape& shape) {
  KernelDescription kernel{
      .name = "sum_of_answers",
      .body = replaced(kAnswers, "BIASED",
                       shape.has_bias ? "+ args.bias.Read(args.chosen.Read(row, i), m)" : ""),
      .tensors = {by_row("answers", shape.hidden), by_row("shares", shape.per_row),
                  by_row("y", shape.hidden, Access::kWrite)},
      .constants = {{"hidden", shape.hidden}, {"per_row", shape.per_row}},
      .lanes = kLanes};
  if (shape.has_bias) {
    kernel.tensors.push_back(by_row("chosen", shape.per_row, Access::kRead, Element::kInt32));
    kernel.tensors.push_back({.name = "bias", .sizes = {shape.experts, shape.hidden}});
  }
  if (shape.has_residual)
    kernel.links["y"].push_back({.code = "value += args.residual.Read(at);",
                                 .tensors = {by_row("residual", shape.hidden)}});
  return kernel;
}

Grid sum_of_answers_grid(std::int64_t hidden, std::int64_t rows) {
  return {.groups = {q4nx::ceil_div(hidden, kLanes), rows, 1}, .lanes = kLanes};
}

}  // namespace flownpu::gpu
