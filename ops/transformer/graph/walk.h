// SPDX-License-Identifier: Apache-2.0
// GraphWalk: finds the producer and the readers of each value of some nodes.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "ops/nodes/node.h"

namespace flownpu::transformer {

// Points into `nodes`, which must not change during its lifetime.
class GraphWalk {
 public:
  // `outputs`: names of the values that are also read outside of these nodes.
  GraphWalk(const std::vector<Node>& nodes, const std::vector<std::string>& outputs);

  // The node that makes the value; null if none of the nodes does.
  const Node* producer(std::string_view value) const;
  const std::vector<const Node*>& readers(std::string_view value) const;
  // The only reader of the value. Throws Error, which quotes `expected`, if there are none or
  // several, or the value is an output.
  const Node& only_reader(std::string_view value, std::string_view expected) const;
  // The same, but Shape nodes, which do not read the value's elements, do not count.
  const Node& only_computing_reader(std::string_view value, std::string_view expected) const;

  // Goes back from `value` through Cast, Reshape and Unsqueeze nodes to the value that these got.
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

// Replaces the nodes `taken` by `one`, at the place of `last`, and removes nodes that only made
// values for these. `outputs`: names of the values that leave the partition. Throws Error if
// another node reads a value that is then no longer computed.
std::vector<Node> with_one_node(const std::vector<Node>& nodes, const GraphWalk& graph,
                                const std::unordered_set<const Node*>& taken, const Node* last,
                                const Node& one, const std::vector<std::string>& outputs);

// Throws Error unless the GatherND `selection` selects the last token, whose index is
// min(seqlens_k, S - 1); Reshapes on the way do not matter.
void check_last_token(const GraphWalk& graph, const Node& selection, std::string_view seqlens_k);

}  // namespace flownpu::transformer
