// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/decoder/lowering.h"

#include <algorithm>
#include <utility>

#include "ops/error.h"
#include "ops/gpu/decoder/constants.h"
#include "ops/gpu/decoder/paged_caches.h"
#include "ops/gpu/operators/lowering.h"
#include "ops/nodes/flow_qkv_attention.h"
#include "ops/transformer/cache/kv_caches.h"
#include "ops/transformer/decoder_matcher.h"
#include "ops/transformer/graph/operators.h"
#include "ops/transformer/paged.h"

namespace flownpu::gpu {
namespace {

void check(const Node& node, const transformer::Decoder& decoder) {
  transformer::check_values_of_decoder(node, decoder);
  for (std::size_t part = 0; part < 2 * decoder.attentions(); ++part) {
    const Value& past = node.inputs[transformer::kFirstPast + part];
    const DataType first = node.inputs[transformer::kFirstPast].type;
    if (past.type != first)
      fail(to_string(node), ": expected all keys and values to be ", name_of(first), ", got ",
           name_of(past.type), " of layer ", part / 2);
  }
  const DataType type = node.inputs[transformer::kFirstPast].type;
  const std::int64_t row = cache_row_bytes(type, decoder.attention().head_size);
  if (row < transformer::kTicketBytes)
    fail(to_string(node), ": expected keys and values of at least ", transformer::kTicketBytes,
         " bytes, got ", row, ", a head of ", decoder.attention().head_size, " elements in ",
         name_of(type));
}

// Adds the table of blocks where caches are paged.
void add_table(Node& node, const transformer::FoundDecoder& found) {
  const Value* table = transformer::block_table(*found.attentions.front());
  if (table == nullptr) return;
  for (const Node* attention : found.attentions)
    if (transformer::block_table(*attention)->name != table->name)
      fail(to_string(*attention), ": expected block_table of all layers to be the same value");
  if (found.decoder.has_states() || found.decoder.given_tables || found.decoder.all_logits)
    fail(to_string(node), ": expected a paged decoder to have attention in each layer, constant ",
         "rotary tables, and logits of each sequence's last token");
  node.attributes[std::string(transformer::kPaged)] = std::int64_t{1};
  node.inputs.push_back(*table);
}

std::vector<Node> with_decoder(const std::vector<Node>& given,
                               const std::vector<std::string>& outputs) {
  static const transformer::DecoderLimits limits{.who = "the GPU",
                                                 .means = "the GPU's kernels",
                                                 .softcap = true,
                                                 .sinks = true,
                                                 .batches = true,
                                                 .int8_caches = true,
                                                 .without_rope = true,
                                                 .biases = true,
                                                 .experts = true,
                                                 .special_experts = true,
                                                 .states = true,
                                                 .all_logits = true,
                                                 .position_ids = true,
                                                 .attention_bias = true,
                                                 .scaled_updates = true,
                                                 .partial_rotation = true,
                                                 .given_tables = true};
  const std::vector<Node> nodes = transformer::with_flow_attention(given);
  const transformer::GraphWalk graph(nodes, outputs);
  const transformer::FoundDecoder found = transformer::find_decoder(nodes, graph, limits);
  Node node = found.node(kGpuDomain);
  check(node, found.decoder);
  write_factors(node, found.constants);
  add_table(node, found);
  for (Value& value : found.state_inputs()) node.inputs.push_back(std::move(value));
  for (Value& value : values_of_constants(found.decoder, found.constants, found.mixtures, nodes))
    node.inputs.push_back(std::move(value));
  std::vector<Node> lowered =
      transformer::with_one_node(nodes, graph, found.taken, found.head, node, outputs);
  if (const auto other = std::ranges::find_if(
          lowered, [](const Node& one) { return transformer::block_table(one) != nullptr; });
      other != lowered.end())
    fail(to_string(*other), ": expected it to be a part of the same decoder");
  return lowered;
}

}  // namespace

bool is_decoder_layers(const Node& node) {
  return node.domain == kGpuDomain && node.op_type == transformer::kDecoderLayers;
}

Lowered lower_decoder(std::vector<Node> nodes, const std::vector<std::string>& outputs) {
  Lowered lowered;
  try {
    lowered.nodes = with_decoder(nodes, outputs);
  } catch (const Error& error) {
    lowered.on_host = left_on_host(nodes, error.what());
    lowered.nodes = std::move(nodes);
    return lowered;
  }
  lowered.on_host = left_on_host(
      lowered.nodes, "it is not one of the decoder's layers, which are what the GPU computes");
  return lowered;
}

std::vector<Lowered::OnHost> left_on_host(const std::vector<Node>& nodes,
                                          const std::string& reason) {
  std::vector<Lowered::OnHost> left;
  for (const Node& node : nodes) {
    if (transformer::is_projection(node) || transformer::is_dense_product(node) ||
        transformer::is_attention(node))
      left.push_back({node.name, node.op_type, reason});
  }
  return left;
}

}  // namespace flownpu::gpu
