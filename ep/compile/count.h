// SPDX-License-Identifier: Apache-2.0
// Counts a graph's nodes and multiply-adds for its placement.
#pragma once

#include <cstdint>
#include <vector>

#include "ep/compile/capability.h"
#include "ep/compile/placement.h"

namespace flownpu {

// The placement of the graph's own nodes, without what compiling finds out: the multiply-adds that
// the provider runs.
Placement count_nodes(const std::vector<GraphNode>& nodes, const Partitions& partitions);

// Adds the multiply-adds of a node that is left to ONNX Runtime.
void count_left(const Node& node, Placement& placement);

// For each body of the graph's If, Loop and Scan that has nodes, in the order in which ONNX Runtime
// asks for them: how often a run of the graph runs it, as far as the graph says; else 1.
std::vector<std::int64_t> runs_of_bodies(const std::vector<GraphNode>& nodes);

}  // namespace flownpu
