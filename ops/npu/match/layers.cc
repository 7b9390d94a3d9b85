// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/match/layers.h"

#include <algorithm>
#include <iterator>
#include <memory>
#include <span>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "ops/error.h"
#include "ops/formats/q4nx.h"
#include "ops/nodes/q4nx_moe.h"
#include "ops/npu/match/array_operator.h"
#include "ops/npu/match/encoder_layers.h"
#include "ops/npu/match/residual_norms.h"
#include "ops/npu/nodes/lowered_node.h"
#include "ops/npu/weights/pack.h"
#include "ops/transformer/decoder_matcher.h"
#include "ops/transformer/graph/operators.h"

namespace flownpu::npu {
namespace {

// Whether the node is a projection, an attention or a mixture of experts, which the array is for.
bool is_for_array(const Node& node) {
  return transformer::is_projection(node) || transformer::is_attention(node) ||
         transformer::is(node, kDomain, "Q4NXMoE");
}

// Makes the packed constants of `node` own the memory of the constants that they are written from,
// where that is not the graph's: weights that were repacked for this session.
void keep_constants(const std::unordered_set<const Node*>& taken, Node& node) {
  std::vector<std::shared_ptr<const void>> owners;
  for (const Node* each : taken) {
    for (const Value& input : each->inputs) {
      if (input.owner != nullptr) owners.push_back(input.owner);
    }
  }
  for (Packed& packed : node.packed) {
    packed.write = [write = std::move(packed.write), owners](std::span<std::byte> memory) {
      write(memory);
    };
  }
}

// Finds a decoder, and puts the node DecoderLayers (ops/transformer/decoder.h) in its place. It
// takes one sequence, and has packed: weights, vectors, rotary (weights/pack.h).
std::vector<Node> with_decoder_layers(const std::vector<Node>& given,
                                      const std::vector<std::string>& outputs) {
  const std::vector<Node> nodes = with_residual_norms(given);
  const transformer::GraphWalk graph(nodes, outputs);
  const transformer::FoundDecoder found = transformer::find_decoder(nodes, graph, array_limits());
  Node node = found.node(kNpuDomain);
  node.packed = pack(DecoderShape{found.decoder}, found.constants);
  keep_constants(found.taken, node);
  // The host's experts read the constants as the graph has them.
  for (const Node* mixture : found.mixtures) {
    for (std::size_t input = kMoeRouter; input <= kMoeScales; ++input) {
      const bool given = mixture->input(input) != nullptr;
      node.inputs.push_back(given ? mixture->inputs[input]
                                  : Value{.name = "", .shape = std::nullopt});
    }
  }
  for (Value& input : found.state_inputs()) node.inputs.push_back(std::move(input));
  return transformer::with_one_node(nodes, graph, found.taken, found.head, node, outputs);
}

// Throws Error if there are no such layers, with the node in the way and what was expected.
std::vector<Node> with_layers(const std::vector<Node>& nodes,
                              const std::vector<std::string>& outputs) {
  return is_encoder(nodes) ? with_encoder_layers(nodes, outputs)
                           : with_decoder_layers(nodes, outputs);
}

// Throws Error unless nodes are in topological order, as ONNX requires. Rules rely on the order,
// and would follow a cycle without end.
void check_order(const std::vector<Node>& nodes) {
  std::unordered_set<std::string_view> to_come;
  for (const Node& node : nodes) {
    for (const Value& output : node.outputs) {
      if (!output.name.empty()) to_come.insert(output.name);
    }
  }
  for (const Node& node : nodes) {
    for (const Value& input : node.inputs) {
      if (to_come.contains(input.name))
        fail(to_string(node), ": expected what makes '", input.name, "' to come before it");
    }
    for (const Value& output : node.outputs) to_come.erase(output.name);
  }
}

struct Taken {
  std::vector<Node> nodes;
  std::vector<std::string> reasons;  // of nodes for the array that are not taken
};

// Nodes that are not taken get an unknown op_type. So all other nodes have the inputs and
// attributes that their operators require.
Taken taken_nodes(std::vector<Judged> graph) {
  Taken taken;
  taken.nodes.reserve(graph.size());
  for (Judged& judged : graph) {
    Node& node = taken.nodes.emplace_back(std::move(judged.node));
    if (judged.reason.empty()) continue;
    if (is_for_array(node) || lowering::is_lowered(node))
      taken.reasons.push_back(std::move(judged.reason));
    node.op_type.insert(0, "unsupported ");
  }
  return taken;
}

Node layers_of(std::vector<Judged> graph, const std::vector<std::string>& outputs,
               const lowering::Promised& promised) {
  Taken taken = taken_nodes(std::move(graph));
  if (!taken.reasons.empty()) throw Error(taken.reasons.front());
  const std::vector<Node> found =
      with_layers(lowering::outline(std::move(taken.nodes), outputs, promised), outputs);
  const Node& node = *std::ranges::find_if(found, is_layers);
  // The checks that are made when a step is made of it.
  if (is_encoder_layers(node))
    EncoderShape::read(node);
  else
    transformer::Decoder::read(node);
  return node;
}

// Judges each node as a session would that knows only the file. Nodes without a name get the name
// of their first output.
std::vector<Judged> judge(std::vector<Node> nodes, const lowering::Promised& promised) {
  for (Node& node : nodes) {
    for (const Value& output : node.outputs) {
      if (node.name.empty()) node.name = output.name;
    }
    for (Value& input : node.inputs) {
      const auto found = promised.find(input.name);
      if (found != promised.end()) input.constant = found->second;
    }
  }
  check_order(nodes);
  const std::unique_ptr<Device> host = make_cpu_device({});
  const transformer::GraphWalk graph_walk(nodes, {});
  const Producer producer = [&](std::string_view value) { return graph_walk.producer(value); };
  std::vector<Judged> graph;
  graph.reserve(nodes.size());
  for (const Node& node : nodes) graph.push_back({node, host->unsupported_in_file(node, producer)});
  return graph;
}

}  // namespace

const transformer::DecoderLimits& array_limits() {
  static const transformer::DecoderLimits limits{.who = "the array",
                                                 .means = "the array's designs",
                                                 .softcap = true,
                                                 .sinks = true,
                                                 .int8_caches = true,
                                                 .without_rope = true,
                                                 .norms_after = true,
                                                 .biases = true,
                                                 .experts = true,
                                                 .special_experts = true,
                                                 .states = true,
                                                 .all_logits = true,
                                                 .position_ids = true,
                                                 .attention_bias = true,
                                                 .scaled_updates = true,
                                                 .partial_rotation = true,
                                                 .given_tables = true,
                                                 .multiple = q4nx::kBlockRows};
  return limits;
}

bool is_decoder_layers(const Node& node) {
  return node.domain == kNpuDomain && node.op_type == transformer::kDecoderLayers;
}

bool is_encoder_layers(const Node& node) {
  return node.domain == kNpuDomain && node.op_type == kEncoderLayers;
}

bool is_layers(const Node& node) { return is_decoder_layers(node) || is_encoder_layers(node); }

std::vector<Lowered::OnHost> left_on_host(const std::vector<Node>& nodes,
                                          const std::string& reason) {
  const bool encoder = is_encoder(nodes);
  std::vector<Lowered::OnHost> left;
  for (const Node& node : nodes) {
    if (encoder ? is_for_encoder(node) : is_for_array(node))
      left.push_back({node.name, node.op_type, reason});
  }
  return left;
}

Lowered lower_layers(std::vector<Node> nodes, const std::vector<std::string>& outputs) {
  Lowered lowered;
  try {
    lowered.nodes = with_layers(nodes, outputs);
  } catch (const Error& error) {
    lowered.on_host = left_on_host(nodes, error.what());
    lowered.nodes = std::move(nodes);
    return lowered;
  }
  // An encoder's graph may have other parts; the host computes them beside the array.
  if (!is_encoder(nodes)) {
    lowered.on_host = left_on_host(
        lowered.nodes, "it is not one of the decoder's layers, which are what the array computes");
  }
  return lowered;
}

Node describe_layers(std::vector<Node> nodes, const std::vector<std::string>& outputs,
                     const lowering::Promised& promised) {
  return layers_of(judge(std::move(nodes), promised), outputs, promised);
}

std::string obstacle_of_layers(std::vector<Judged> graph, const std::vector<std::string>& outputs) {
  try {
    layers_of(std::move(graph), outputs, {});
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

GraphOperators describe_operators(std::vector<Node> nodes, const std::vector<std::string>& outputs,
                                  const lowering::Promised& promised) {
  Taken taken = taken_nodes(judge(std::move(nodes), promised));
  GraphOperators found;
  found.left = std::move(taken.reasons);
  const Lowered lowered =
      lower_layers(lowering::outline(std::move(taken.nodes), outputs, promised), outputs);
  for (const Node& node : lowered.nodes) {
    if (!is_operator(node)) continue;
    try {
      std::ranges::copy(describe_operator(node).sizes, std::back_inserter(found.sizes));
    } catch (const Error& error) {
      found.left.emplace_back(error.what());
    }
  }
  return found;
}

}  // namespace flownpu::npu
