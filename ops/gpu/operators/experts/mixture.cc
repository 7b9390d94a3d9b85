// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/operators/experts/mixture.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "ops/error.h"
#include "ops/gpu/kernels/matrices/q4nx_matmul.h"
#include "ops/gpu/operators/run.h"

namespace flownpu::gpu {
namespace {

void launch_with(Context& context, const CompiledKernel& kernel, const Grid& grid,
                 std::span<const Buffer* const> buffers,
                 std::span<const std::int64_t> parameters = {}) {
  std::vector<KernelArgument> arguments(buffers.begin(), buffers.end());
  for (const std::int64_t parameter : parameters)
    arguments.emplace_back(static_cast<std::int32_t>(parameter));
  context.launch(kernel, arguments, grid);
}

// Bytes of each part, for so many rows.
std::array<std::int64_t, MixtureMemory::kParts> bytes_of_mixture(const MixtureShape& shape,
                                                                 std::int64_t rows) {
  constexpr auto kWord = static_cast<std::int64_t>(sizeof(float));
  const RouterShape& router = shape.router;
  const std::int64_t choices = rows * router.per_row;
  const std::int64_t groups =
      std::max(rows * q4nx::groups_of(router.hidden), choices * q4nx::groups_of(shape.inner));
  std::array<std::int64_t, MixtureMemory::kParts> bytes{};
  bytes[MixtureMemory::kLogits] = rows * router.experts * kWord;
  bytes[MixtureMemory::kChosen] = bytes[MixtureMemory::kShares] = bytes[MixtureMemory::kOrder] =
      choices * kWord;
  bytes[MixtureMemory::kTiles] = tiles_of_experts(router.experts, choices, kMatmulTile) * 3 * kWord;
  bytes[MixtureMemory::kCodes] = groups * q4nx::kGroup;
  bytes[MixtureMemory::kScales] = bytes[MixtureMemory::kSums] = groups * kWord;
  bytes[MixtureMemory::kGated] = choices * shape.inner * kWord;
  bytes[MixtureMemory::kAnswers] = choices * router.hidden * kWord;
  return bytes;
}

}  // namespace

std::int64_t MixtureShape::bytes(std::int64_t rows) const {
  const auto all = bytes_of_mixture(*this, rows);
  return std::accumulate(all.begin(), all.end(), std::int64_t{0});
}

void MixtureMemory::reserve(Context& context, const MixtureShape& shape, std::int64_t most) {
  if (most <= rows) return;
  std::vector<Buffer> made;
  for (const std::int64_t bytes : bytes_of_mixture(shape, most)) {
    check_bytes(static_cast<std::size_t>(bytes), "what experts compute");
    made.push_back(context.allocate(static_cast<std::size_t>(bytes)));
  }
  parts = std::move(made);
  rows = most;
}

MixtureWeights place_mixture(std::span<const Value> values,
                             const std::function<Buffer(const Value&)>& place) {
  MixtureWeights weights;
  weights.inputs.resize(MixtureWeights::kValues);
  for (std::size_t i = 0; i < std::min(values.size(), MixtureWeights::kValues); ++i) {
    const Value& value = values[i];
    if (value.name.empty() || value.constant == nullptr) continue;
    weights.inputs[i] = place(value);
    const auto layout = [&] {
      return q4nx::layout_of(value.shape.value_or(Shape{0})).value_or(q4nx::kNarrow);
    };
    if (i + kMoeRouter == kMoeRouter) weights.router = element_of(value.type);
    if (i + kMoeRouter == kMoeGateUp) weights.gate_up = layout();
    if (i + kMoeRouter == kMoeDown) weights.down = layout();
  }
  return weights;
}

Mixture::Mixture(Context& context, const MixtureShape& shape, const MixtureWeights& weights,
                 const Options& options)
    : shape_(shape), weights_(weights), rounds_(options.rounds) {
  RouterShape& router = shape_.router;
  if (router.experts > kMostExpertsOfRow)
    fail("[FlowNPU] device 'gpu': expected at most ", kMostExpertsOfRow, " experts, got ",
         router.experts, ": use device = cpu");
  router.weight = weights.router;
  router.has_logits_bias = weights.has(kMoeLogitsBias);
  router.has_bias = weights.has(kMoeBias);
  router.has_scales = weights.has(kMoeScales);
  const ExpertsShape experts{.count = router.experts, .share = router.per_row};
  ExpertsShape inwards = experts;
  inwards.has_bias = weights.has(kMoeGateUpBias);
  inwards.alpha = shape.alpha;
  inwards.beta = shape.beta;
  inwards.limit = shape.limit;
  ExpertsShape outwards = experts;
  outwards.share = 1;
  const ProductShape gate_up{.rows = shape.inner,
                             .columns = router.hidden,
                             .layout = weights.gate_up,
                             .gating = shape.gating,
                             .result = Element::kFloat32,
                             .experts = inwards};
  const ProductShape down{.rows = router.hidden,
                          .columns = shape.inner,
                          .layout = weights.down,
                          .given = Element::kFloat32,
                          .result = Element::kFloat32,
                          .experts = outwards};
  if (rounds_ && ways_with_matrices(options.matrices, gate_up, context).front())
    matrices_ = context.facts().matrices;
  if (weights.has(kMoeRouter)) logits_ = context.compile(router_logits(router), options.activation);
  choose_ = context.compile(choose_experts(router));
  if (rounds_)
    sort_ =
        context.compile(sort_by_expert(router.experts, matrices_ ? kMatricesTile : kMatmulTile));
  gate_up_ = compile_product(context, gate_up, kMoeGateUp, options);
  gate_up_.share = router.per_row;
  if (inwards.has_bias) gate_up_.bias = &weights.of(kMoeGateUpBias);
  down_ = compile_product(context, down, kMoeDown, options);
  AnswersShape summed{.experts = router.experts,
                      .per_row = router.per_row,
                      .hidden = router.hidden,
                      .has_bias = weights.has(kMoeDownBias)};
  sum_ = context.compile(sum_of_answers(summed));
  summed.has_residual = true;
  sum_with_residual_ = context.compile(sum_of_answers(summed));
}

Mixture::Product Mixture::compile_product(Context& context, ProductShape shape, MoeInput weight,
                                          const Options& options) const {
  shape.teams = teams_for(shape, context.facts()).front();
  Product product;
  product.shape = shape;
  product.weight = &weights_.of(weight);
  product.fused = context.compile(fused_dqp(shape), options.activation);
  if (!rounds_) return product;
  product.quantize = context.compile(quantize_rows(shape.columns, shape.given), options.activation);
  product.rounded =
      context.compile(matrices_ ? q4nx_matmul_of_matrices(shape, *matrices_) : q4nx_matmul(shape),
                      options.activation);
  return product;
}

void Mixture::multiply(Context& context, const MixtureMemory& memory, const Product& product,
                       std::int64_t choices, const Buffer* x, const Buffer* y, bool sorted) const {
  const auto part = [&](MixtureMemory::Part one) { return &memory.parts[one]; };
  const ProductShape& shape = product.shape;
  std::vector<const Buffer*> buffers{x, product.weight, y, part(MixtureMemory::kChosen)};
  if (sorted)
    buffers = {part(MixtureMemory::kCodes),
               part(MixtureMemory::kScales),
               part(MixtureMemory::kSums),
               product.weight,
               y,
               part(MixtureMemory::kOrder),
               part(MixtureMemory::kTiles)};
  if (product.bias != nullptr) buffers.push_back(product.bias);
  if (!sorted) return launch_with(context, *product.fused, fused_dqp_grid(shape, choices), buffers);
  launch_with(context, *product.quantize,
              quantize_rows_grid(shape.columns, choices / product.share),
              std::array{x, part(MixtureMemory::kCodes), part(MixtureMemory::kScales),
                         part(MixtureMemory::kSums)});
  const std::int64_t tile = matrices_ ? kMatricesTile : kMatmulTile;
  const std::int64_t places = tiles_of_experts(shape_.router.experts, choices, tile) * tile;
  launch_with(
      context, *product.rounded,
      matrices_ ? q4nx_matmul_of_matrices_grid(shape, places) : q4nx_matmul_grid(shape, places),
      buffers, std::array{choices});
}

void Mixture::enqueue(Context& context, MixtureMemory& memory, std::int64_t rows, const Buffer* x,
                      const Buffer* y, const Buffer* residual, const Buffer* logits) const {
  memory.reserve(context, shape_, rows);
  const auto part = [&](MixtureMemory::Part one) { return &memory.parts[one]; };
  const RouterShape& router = shape_.router;
  const std::int64_t choices = rows * router.per_row;
  if (logits == nullptr) {
    logits = part(MixtureMemory::kLogits);
    std::vector<const Buffer*> buffers{x, &weights_.of(kMoeRouter), logits};
    if (router.has_logits_bias) buffers.push_back(&weights_.of(kMoeLogitsBias));
    launch_with(context, *logits_, router_logits_grid(router, rows), buffers);
  }
  std::vector<const Buffer*> chosen{logits, part(MixtureMemory::kChosen),
                                    part(MixtureMemory::kShares)};
  if (router.has_bias) chosen.push_back(&weights_.of(kMoeBias));
  if (router.has_scales) chosen.push_back(&weights_.of(kMoeScales));
  launch_with(context, *choose_, choose_experts_grid(rows), chosen);
  const bool sorted = rounds_ && rows > 1;
  if (sorted)
    launch_with(context, *sort_, sort_by_expert_grid(router.experts),
                std::array{part(MixtureMemory::kChosen), part(MixtureMemory::kOrder),
                           part(MixtureMemory::kTiles)},
                std::array{choices});
  multiply(context, memory, gate_up_, choices, x, part(MixtureMemory::kGated), sorted);
  multiply(context, memory, down_, choices, part(MixtureMemory::kGated),
           part(MixtureMemory::kAnswers), sorted);
  std::vector<const Buffer*> summed{part(MixtureMemory::kAnswers), part(MixtureMemory::kShares), y};
  if (weights_.has(kMoeDownBias))
    summed.insert(summed.end(), {part(MixtureMemory::kChosen), &weights_.of(kMoeDownBias)});
  if (residual != nullptr) summed.push_back(residual);
  launch_with(context, residual != nullptr ? *sum_with_residual_ : *sum_,
              sum_of_answers_grid(router.hidden, rows), summed);
}

}  // namespace flownpu::gpu
