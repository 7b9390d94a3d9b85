// SPDX-License-Identifier: Apache-2.0
// Decides which nodes of a graph the device takes, and groups them into partitions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ep/model/graph.h"
#include "ops/device.h"

namespace flownpu {

struct Partitions {
  // For each partition its node indices, in topological order. Every partition is convex (no path
  // leaves it and comes back), and there are as few as that allows: one if all nodes are taken.
  std::vector<std::vector<std::size_t>> taken;
  struct Rejected {
    std::size_t node;
    std::string reason;
  };
  std::vector<Rejected> rejected;
  // The number of nodes that another provider has already taken.
  std::size_t elsewhere = 0;
};

Partitions partition(const Device& device, const std::vector<GraphNode>& nodes);

// Multiply-adds for one token of a node that the device did not take, which has no Step. For a
// matrix product it is the number of elements of its weight, for all other nodes 0.
std::int64_t estimate_multiply_adds(const Node& node);

}  // namespace flownpu
