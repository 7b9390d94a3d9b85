// SPDX-License-Identifier: Apache-2.0
// Graph: the nodes of a partition while rules change them.
#pragma once

#include <functional>
#include <list>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "ops/node.h"

namespace flownpu::lowering {

class Graph {
 public:
  // `nodes` in topological order; `outputs`: names of the values that others read.
  Graph(std::vector<Node> nodes, const std::vector<std::string>& outputs);

  // Calls visit(node) for each node of the operator, in order; it may change the node, and others
  // through the functions below.
  void each(std::string_view op_type, std::string_view domain,
            const std::function<void(Node&)>& visit);

  // Null if none of the nodes makes it.
  Node* producer(std::string_view value);
  // The same, if it is of this operator and `value`, its first output, is read once.
  Node* only_producer(std::string_view value, std::string_view op_type, std::string_view domain);
  // How many inputs of nodes are this value, of those that something needs; an output of the graph
  // counts as one more.
  std::size_t readers(std::string_view value);

  // To be called after inputs or outputs of nodes were changed.
  void changed() { known_ = false; }
  // The nodes in order, without those of whose outputs none is read.
  std::vector<Node> take();

 private:
  void look();

  std::list<Node> nodes_;
  std::unordered_set<std::string> outputs_;
  bool known_ = false;
  std::unordered_map<std::string_view, Node*> producers_;
  std::unordered_map<std::string_view, std::size_t> readers_;
};

// The input, or a value without a name where it is absent.
Value input_or_none(const Node& node, std::size_t index);

// The constant's integers (int64 or int32), or none if it is no such constant.
std::vector<std::int64_t> constant_integers(const Value* value);

}  // namespace flownpu::lowering
