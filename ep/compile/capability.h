// SPDX-License-Identifier: Apache-2.0
// Which nodes of a graph the device takes, and how they are cut into partitions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ep/model/graph.h"
#include "ops/device.h"

namespace flownpu {

struct Partitions {
  // Node indices, in topological order; every partition is convex: no path leaves it and comes
  // back. There are as few as that allows: one for a graph that is taken whole.
  std::vector<std::vector<std::size_t>> taken;
  struct Rejected {
    std::size_t node;
    std::string reason;
  };
  std::vector<Rejected> rejected;
  // Nodes that are with another provider already.
  std::size_t elsewhere = 0;
};

Partitions partition(const Device& device, const std::vector<GraphNode>& nodes);

// Multiply-adds for one token, for a node that no Step could be made of: the elements of the weight
// that a matrix product multiplies with; 0 for all others.
std::int64_t estimate_multiply_adds(const Node& node);

}  // namespace flownpu
