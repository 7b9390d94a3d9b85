// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/run/layer_experts.h"

#include <algorithm>
#include <array>
#include <memory>
#include <string>

#include "ops/cpu/products/q4nx_moe.h"
#include "ops/error.h"
#include "ops/formats/q4nx.h"
#include "ops/nodes/q4nx_moe.h"
#include "ops/transformer/decoder_call.h"

namespace flownpu::npu {
namespace {

constexpr std::size_t kConstants = kMoeScales - kMoeRouter + 1;  // of a layer

// The mixture of a layer as a node of the graph.
Node mixture_of(const Node& node, const transformer::Decoder& decoder, std::size_t layer) {
  const transformer::FeedForward& given = decoder.layers[layer].feed_forward;
  Node mixture;
  mixture.name = node.name + ", experts of layer " + std::to_string(layer);
  mixture.op_type = "Q4NXMoE";
  mixture.domain = kDomain;
  mixture.attributes = {
      {"num_experts", given.experts},
      {"experts_per_token", given.experts_per_token},
      {"hidden_size", decoder.hidden},
      {"expert_size", given.size},
      {"normalize_routing_weights", std::int64_t{given.normalized_experts}},
      {"swiglu_alpha", given.swiglu_alpha},
      {"swiglu_beta", given.swiglu_beta},
      {"swiglu_limit", given.swiglu_limit},
      {"gating",
       std::string(transformer::kActivations.at(static_cast<std::size_t>(given.activation)))}};
  mixture.inputs = {{.name = "rows", .shape = std::nullopt}};
  const std::size_t first = node.inputs.size() - transformer::count_of_state_inputs(decoder) -
                            LayerExperts::inputs(decoder) + layer * kConstants;
  for (std::size_t i = 0; i < kConstants; ++i) mixture.inputs.push_back(node.inputs[first + i]);
  mixture.outputs = {{.name = "answers", .shape = std::nullopt}};
  return mixture;
}

}  // namespace

std::size_t LayerExperts::inputs(const transformer::Decoder& decoder) {
  return decoder.feed_forward().experts > 0 ? kConstants * decoder.layers.size() : 0;
}

LayerExperts::LayerExperts(const Node& node, const DecoderShape& shape, const cpu::Context& context,
                           std::span<const std::byte> packed)
    : router_{shape.feed_forward().experts, shape.feed_forward().experts_per_token, shape.hidden,
              shape.feed_forward().normalized_experts},
      context_(context) {
  const std::byte* first = packed.data();
  for (std::size_t layer = 0; layer < shape.layers.size(); ++layer) {
    Node mixture = mixture_of(node, shape, layer);
    const auto [qkv, output, gate_up, down] = shape.projections(shape.layers[layer]);
    const auto stride = static_cast<std::int64_t>(shape.expert_bytes(shape.layers[layer]));
    const cpu::ExpertPlaces places{.gate_up = stride, .down = stride, .in_turns = true};
    std::array<Tensor, 2>& weights = packed_.emplace_back();
    // The host reads 8 bits as the graph has them, not in planes.
    if (packed.empty() || gate_up.eight_bits || down.eight_bits) {
      steps_.push_back(cpu::make_q4nx_moe(mixture, context, nullptr));
      if (!packed.empty()) first += router_.experts * stride;
      continue;
    }
    weights[0].data = const_cast<std::byte*>(first);
    weights[1].data = const_cast<std::byte*>(first + gate_up.bytes());
    // Shapes as of weights that follow one another, which tell the layout of blocks.
    const std::int64_t inner = q4nx::row_blocks(shape.feed_forward().size) * q4nx::kBlockRows;
    weights[0].shape = q4nx::blocks_shape(router_.experts * 2 * inner, shape.hidden, q4nx::kWide);
    const std::int64_t outer = q4nx::row_blocks(shape.hidden) * q4nx::kBlockRows;
    weights[1].shape =
        q4nx::blocks_shape(router_.experts * outer, shape.feed_forward().size, q4nx::kWide);
    for (std::size_t i = 0; i < weights.size(); ++i) {
      weights[i].type = DataType::kUInt8;
      Value& value = mixture.inputs[kMoeGateUp + i];
      value = {.name = value.name,
               .type = DataType::kUInt8,
               .shape = weights[i].shape,
               .constant = weights[i].data};
    }
    steps_.push_back(cpu::make_q4nx_moe(mixture, context, nullptr, places));
    first += router_.experts * stride;
  }
}

std::span<const Tensor> LayerExperts::constants_of(std::size_t layer, std::size_t elements) const {
  const auto hidden = static_cast<std::size_t>(router_.hidden);
  if (layer >= steps_.size() || elements % hidden != 0)
    fail("[FlowNPU] expected rows of ", hidden, " elements for one of ", steps_.size(),
         " layers with experts, got ", elements, " for layer ", layer);
  return constants_.subspan(layer * kConstants, kConstants);
}

void LayerExperts::answer(std::size_t layer, std::span<float> x, std::span<float> answers) const {
  const Shape shape{static_cast<std::int64_t>(x.size()) / router_.hidden, router_.hidden};
  const std::span<const Tensor> constants = constants_of(layer, x.size());
  const bool own = packed_[layer][0].data == nullptr;
  std::array<Tensor, kConstants + 1> inputs{Tensor{.data = x.data(), .shape = shape}};
  std::ranges::copy(constants, inputs.begin() + kMoeRouter);
  if (!own) std::ranges::copy(packed_[layer], inputs.begin() + kMoeGateUp);
  const Tensor output{.data = answers.data(), .shape = shape};
  const std::size_t bytes = steps_[layer]->scratch_bytes(inputs);
  // Steps want their working memory aligned to 64 bytes.
  std::size_t space = bytes + 64;
  memory_.resize(std::max(memory_.size(), space));
  void* scratch = memory_.data();
  std::align(64, bytes, scratch, space);
  steps_[layer]->run(inputs, std::span(&output, 1), {static_cast<std::byte*>(scratch), bytes});
}

void LayerExperts::route(std::size_t layer, std::span<const float> x,
                         std::span<std::int32_t> chosen, std::span<float> shares) const {
  const Tensor& weight = constants_of(layer, x.size()).front();
  if (static_cast<std::int64_t>(chosen.size()) != router_.per_row)
    fail("[FlowNPU] expected ", router_.per_row, " experts of a token, got ", chosen.size());
  logits_.resize(static_cast<std::size_t>(router_.experts));
  router_.rank(context_.kernels, *context_.pool,
               {weight.data, weight.type, router_.hidden, router_.experts, true}, x.data(), 1,
               logits_.data());
  router_.choose(context_.kernels, *context_.pool, 1, logits_.data(), nullptr, chosen.data(),
                 shares.data());
}

}  // namespace flownpu::npu
