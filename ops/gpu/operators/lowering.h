// SPDX-License-Identifier: Apache-2.0
// Which nodes of a session's graph the device computes by themselves: products and attention of
// graphs without a KV cache, an encoder's. A decoder that is not computed as one node is the
// host's: from token to token each of its products would wait for the one before it to come back.
#pragma once

#include <string>
#include <vector>

#include "ops/device.h"
#include "ops/nodes/node.h"

namespace flownpu::gpu {

// In the device's domain: what no other device computes.
inline constexpr std::string_view kGpuDomain = "ai.flownpu.gpu";

bool is_operator_alone(const Node& node);
// The node as the graph had it.
Node operator_of_graph(const Node& node);

// Whether there are products or attention, and no attention that keeps keys and values.
bool is_without_cache(const std::vector<Node>& nodes);
// Gives them to the device, and says of those that it does not take why.
Lowered lower_operators(std::vector<Node> nodes);
// "12 products and 2 attentions one by one", of lowered nodes.
std::string describe_operators(const std::vector<Node>& nodes);

}  // namespace flownpu::gpu
