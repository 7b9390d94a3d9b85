// SPDX-License-Identifier: Apache-2.0
// GraphWalk: who makes and who reads the values of some nodes.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "ops/nodes/node.h"

namespace flownpu::layers {

// Points into `nodes`, which must stay as they are.
class GraphWalk {
 public:
  // `outputs`: names of the values that others than these nodes read.
  GraphWalk(const std::vector<Node>& nodes, const std::vector<std::string>& outputs);

  // Null if none of the nodes makes it.
  const Node* producer(std::string_view value) const;
  const std::vector<const Node*>& readers(std::string_view value) const;
  // Throws Error that says `expected` if there are others or none.
  const Node& only_reader(std::string_view value, std::string_view expected) const;
  // The same, of those that read more of it than its shape.
  const Node& only_computing_reader(std::string_view value, std::string_view expected) const;

  // The value before Casts, Reshapes and Unsqueezes of it.
  std::string_view value_through_reshapes(std::string_view value) const;
  const Node* producer_through_reshapes(std::string_view value) const {
    return producer(value_through_reshapes(value));
  }

 private:
  const Node& only(const std::vector<const Node*>& all, std::string_view value,
                   std::string_view expected) const;

  std::unordered_map<std::string_view, const Node*> producers_;
  std::unordered_map<std::string_view, std::vector<const Node*>> readers_;
  std::unordered_set<std::string_view> outputs_;
};

// The nodes with `one` in the place of those that are `taken`, where `last` of them was; without
// the nodes that made values for these alone. `outputs`: names of the values that leave the
// partition. Throws Error if another node reads what is not computed any more.
std::vector<Node> with_one_node(const std::vector<Node>& nodes, const GraphWalk& graph,
                                const std::unordered_set<const Node*>& taken, const Node* last,
                                const Node& one, const std::vector<std::string>& outputs);

}  // namespace flownpu::layers
