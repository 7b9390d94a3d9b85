// SPDX-License-Identifier: Apache-2.0
// Chooses the nodes of a session's graph that the device computes as operators: in graphs without a
// KV cache, such as an encoder's or a diffusion model's, products, convolutions and attention, and
// what computes with their results. A decoder that cannot be one node is left to the host, because
// each of its tokens would wait for some hundred kernels.
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
// The node as it was in the graph, in its domain.
Node operator_of_graph(const Node& node);

// Whether the graph has products, convolutions or attention, and no attention that keeps keys and
// values.
bool is_without_cache(const std::vector<Node>& nodes);
// Gives operators to the device. Those that it does not take stay on the host, with the reason.
Lowered lower_operators(std::vector<Node> nodes);
// "812 of 830 steps on the device": the text about lowered nodes in the placement line.
std::string describe_operators(const std::vector<Node>& nodes);

}  // namespace flownpu::gpu
