// SPDX-License-Identifier: Apache-2.0
// Chooses the nodes of a session's graph that the device computes one by one: products and
// attention of graphs without a KV cache, such as an encoder's. A decoder that cannot be one node
// is left to the host, because each of its products would wait for the result of the one before,
// for every token.
#pragma once

#include <string>
#include <vector>

#include "ops/device.h"
#include "ops/nodes/node.h"

namespace flownpu::gpu {

// The domain of lowered nodes, which no other device computes.
inline constexpr std::string_view kGpuDomain = "ai.flownpu.gpu";

// Whether the node is an operator that lower_operators() gave to the device.
bool is_operator_alone(const Node& node);
// The node as it was in the graph, in FlowNPU's domain.
Node operator_of_graph(const Node& node);

// Whether the graph has products or attention, and no attention that keeps keys and values.
bool is_without_cache(const std::vector<Node>& nodes);
// Gives products and attention to the device. Those that it does not take stay on the host, with
// the reason.
Lowered lower_operators(std::vector<Node> nodes);
// "12 products and 2 attentions one by one": the text about lowered nodes in the placement line.
std::string describe_operators(const std::vector<Node>& nodes);

}  // namespace flownpu::gpu
