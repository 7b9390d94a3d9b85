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

// Why the device does not take the node; "" if it does.
std::string reason_against(const Device& device, const GraphNode& node, const Producer& producer);

// `left`: for each node the reason for which it is not to be taken, or ""; or nothing.
Partitions partition(const Device& device, const std::vector<GraphNode>& nodes,
                     const std::vector<std::string>& left = {});

// A product of activations with a weight.
struct Product {
  // For one row of activations, or one pixel; 0 for nodes of other kinds.
  std::int64_t multiply_adds = 0;
  // Rows or pixels, as far as the graph says; a size that it leaves open counts as 1: one token.
  std::int64_t rows = 1;
  // Whether the graph says all sizes that make rows.
  bool has_rows = false;
  // False for convolutions of images of unknown size, whose pixels no token stands for.
  bool is_known = true;
};
Product product_of(const Node& node);

}  // namespace flownpu
