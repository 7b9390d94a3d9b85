// SPDX-License-Identifier: Apache-2.0
// Graph: the nodes of a model, or of a partition of it, while rules change them; and what the rules
// report.
#pragma once

#include <functional>
#include <list>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "ops/nodes/contract.h"
#include "ops/nodes/node.h"

namespace flownpu::lowering {

// A place where a rule nearly applied: what was expected there, and what it is.
struct Miss {
  std::string rule;
  std::string node;
  std::string reason;
};

// How often rules applied, where they nearly did, and what of that is no model that anyone could
// run.
struct Report {
  std::map<std::string, int, std::less<>> applied;
  std::vector<Miss> misses;
  std::vector<std::string> damage;
};

class Graph {
 public:
  // `nodes` in topological order; `outputs`: names of the values that others read; `taken`: names
  // that no new value may have, beside those of the nodes' values.
  Graph(std::vector<Node> nodes, const std::vector<std::string>& outputs,
        const std::vector<std::string>& taken = {});

  // From now on leaves nodes alone that have an input, an output or an attribute of which their
  // operator's contract knows nothing, and reports them: a rule that draws nodes together would
  // lose it. Those that lack an input, too: rules look at it.
  void leave_unknown(std::span<const Contract> contracts);

  // Calls visit(node) for each node of the operator, in order; it may change the node, and others
  // through the functions below.
  void each(std::string_view op_type, std::string_view domain,
            const std::function<void(Node&)>& visit);

  // Null if none of the nodes makes it, or one that is left alone.
  Node* producer(std::string_view value);
  // The same, if it is of this operator.
  Node* producer(std::string_view value, std::string_view op_type, std::string_view domain);
  // The same, if `value`, its first output, is read once.
  Node* only_producer(std::string_view value, std::string_view op_type, std::string_view domain);
  // How many inputs of nodes are this value, of those that something needs; an output of the graph
  // counts as one more.
  std::size_t readers(std::string_view value);
  // `name`, or with a number behind it if there is such a value.
  std::string unique_name(const std::string& name);

  // To be called after inputs or outputs of nodes were changed.
  void changed() { known_ = false; }
  // The nodes in order, without those of whose outputs none is read.
  std::vector<Node> take();

  void applied(std::string_view rule) { ++report_.applied[std::string(rule)]; }
  void missed(std::string_view rule, const Node& node, std::string reason);
  // The same, of a node that is damaged.
  void damaged(std::string_view rule, const Node& node, const std::string& reason);
  const Report& report() const { return report_; }

 private:
  void look();

  std::list<Node> nodes_;
  std::unordered_set<std::string> outputs_;
  std::unordered_set<std::string> taken_;
  std::unordered_set<const Node*> left_;
  bool known_ = false;
  std::unordered_map<std::string_view, Node*> producers_;
  std::unordered_map<std::string_view, std::size_t> readers_;
  Report report_;
};

// The input, or a value without a name where it is absent.
Value input_or_none(const Node& node, std::size_t index);

// The constant's integers (int64 or int32), or none if it is no such constant.
std::vector<std::int64_t> constant_integers(const Value* value);

// "[0, -1, 16]".
std::string text_of(const std::vector<std::int64_t>& integers);

}  // namespace flownpu::lowering
