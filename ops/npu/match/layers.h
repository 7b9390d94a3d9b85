// SPDX-License-Identifier: Apache-2.0
// What the array computes of a graph: a decoder's layers or an encoder's, which become one node,
// and operators by themselves.
#pragma once

#include <string>
#include <vector>

#include "ops/device.h"
#include "ops/lowering/lowering.h"
#include "ops/nodes/node.h"

namespace flownpu::npu {

// Whether it is the one that layers became.
bool is_layers(const Node& node);
bool is_decoder_layers(const Node& node);
bool is_encoder_layers(const Node& node);

// The nodes that are for the array, with one reason why it does not compute them.
std::vector<Lowered::OnHost> left_on_host(const std::vector<Node>& nodes,
                                          const std::string& reason);

// The nodes with the layers as one, without those that nothing reads any more; `outputs`: names of
// the values that leave the partition. Where there are no such layers, the nodes as they are, and
// why for each that is for the array: which node is in the way, and what was expected.
Lowered lower_layers(std::vector<Node> nodes, const std::vector<std::string>& outputs);

// Why a graph of which some nodes are not taken has no such layers; empty if it has.
std::string obstacle_of_layers(std::vector<Judged> graph, const std::vector<std::string>& outputs);

// The node that the layers become in a session of a model's file, exported or converted: its
// attributes are their sizes (DecoderShape, EncoderShape). It cannot be prepared. `nodes`: all of
// the graph's, as its file has them. Throws Error with the reason that a session would tell.
Node describe_layers(std::vector<Node> nodes, const std::vector<std::string>& outputs,
                     const lowering::Promised& promised);

// What the array has to have programs for in the same file, beside its layers, if it has any.
struct GraphOperators {
  std::vector<Node> sizes;        // ArrayOperator::sizes, of all nodes
  std::vector<std::string> left;  // why others stay on the host
};
// Throws Error for a graph whose nodes are not in order.
GraphOperators describe_operators(std::vector<Node> nodes, const std::vector<std::string>& outputs,
                                  const lowering::Promised& promised);

}  // namespace flownpu::npu
