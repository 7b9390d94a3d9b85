// SPDX-License-Identifier: Apache-2.0
// Finds the parts of a graph that the array computes: the layers of a decoder or an encoder, which
// become one node, and single operators.
#pragma once

#include <string>
#include <vector>

#include "ops/device.h"
#include "ops/lowering/lowering.h"
#include "ops/nodes/node.h"
#include "ops/transformer/decoder_matcher.h"

namespace flownpu::npu {

// The kinds of layers that the array computes.
const transformer::DecoderLimits& array_limits();

// Whether the node stands for the layers of a decoder or an encoder.
bool is_layers(const Node& node);
bool is_decoder_layers(const Node& node);
bool is_encoder_layers(const Node& node);

// The nodes for the array, each with `reason` for staying on the host.
std::vector<Lowered::OnHost> left_on_host(const std::vector<Node>& nodes,
                                          const std::string& reason);

// The nodes with the layers as one node, without nodes that nothing reads any more. `outputs`:
// names of the values that leave the partition. If there are no such layers, returns the nodes
// unchanged. Each node for the array then has a reason: the node in the way, and the expectation.
Lowered lower_layers(std::vector<Node> nodes, const std::vector<std::string>& outputs);

// The reason why a graph with nodes that may not be taken has no such layers; empty if it has.
std::string obstacle_of_layers(std::vector<Judged> graph, const std::vector<std::string>& outputs);

// The node that the layers of a model's file, exported or converted, become in a session. Its
// attributes are their sizes (DecoderShape, EncoderShape); it cannot be prepared. `nodes`: all of
// the graph's, as the file has them. Throws Error with the reason that a session would give.
Node describe_layers(std::vector<Node> nodes, const std::vector<std::string>& outputs,
                     const lowering::Promised& promised);

// Operators by themselves in the same file, for which the array needs programs beside its layers'.
struct GraphOperators {
  std::vector<Node> sizes;        // ArrayOperator::sizes, of all nodes
  std::vector<std::string> left;  // reasons of nodes that stay on the host
};
// Throws Error for a graph whose nodes are not in topological order.
GraphOperators describe_operators(std::vector<Node> nodes, const std::vector<std::string>& outputs,
                                  const lowering::Promised& promised);

}  // namespace flownpu::npu
