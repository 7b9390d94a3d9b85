// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/run/layer_experts.h"

#include <algorithm>
#include <array>
#include <memory>
#include <string>

#include "ops/error.h"

namespace flownpu::npu {
namespace {

constexpr std::size_t kConstants = 3;  // of a layer

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
      {"gating",
       std::string(transformer::kActivations.at(static_cast<std::size_t>(given.activation)))}};
  mixture.inputs = {{.name = "rows", .shape = std::nullopt}};
  const std::size_t first = node.inputs.size() - LayerExperts::inputs(decoder) + layer * kConstants;
  for (std::size_t i = 0; i < kConstants; ++i) mixture.inputs.push_back(node.inputs[first + i]);
  mixture.outputs = {{.name = "answers", .shape = std::nullopt}};
  return mixture;
}

}  // namespace

std::size_t LayerExperts::inputs(const transformer::Decoder& decoder) {
  return decoder.feed_forward().experts > 0 ? kConstants * decoder.layers.size() : 0;
}

LayerExperts::LayerExperts(const Node& node, const transformer::Decoder& decoder,
                           const HostCompute& compute, const Device& host)
    : router_{decoder.feed_forward().experts, decoder.feed_forward().experts_per_token,
              decoder.hidden, decoder.feed_forward().normalized_experts},
      kernels_(compute.kernels),
      pool_(compute.pool) {
  for (std::size_t layer = 0; layer < decoder.layers.size(); ++layer)
    steps_.push_back(host.prepare(mixture_of(node, decoder, layer)));
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
  const std::array inputs{Tensor{.data = x.data(), .shape = shape}, constants[0], constants[1],
                          constants[2]};
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
  router_.rank(*kernels_, *pool_, {weight.data, weight.type, router_.hidden, router_.experts, true},
               x.data(), 1, logits_.data());
  router_.choose(*kernels_, *pool_, 1, logits_.data(), chosen.data(), shares.data());
}

}  // namespace flownpu::npu
