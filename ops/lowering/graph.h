// SPDX-License-Identifier: Apache-2.0
// Graph: the nodes of a model, or of a partition of it, while lowering rules change them; and the
// rules' report.
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

// A node to which a rule nearly applied, with the reason: what was expected, and what came.
struct Miss {
  std::string rule;
  std::string node;
  std::string reason;
};

// The rules' applications and misses, and the damaged nodes, with which nobody could run the model.
struct Report {
  std::map<std::string, int, std::less<>> applied;
  std::vector<Miss> misses;
  std::vector<std::string> damage;
};

class Graph {
 public:
  // `nodes` in topological order; `outputs`: names of the values that are read outside of the
  // graph; `taken`: names that no new value may have, beside those of the nodes' values.
  Graph(std::vector<Node> nodes, const std::vector<std::string>& outputs,
        const std::vector<std::string>& taken = {});

  // From now on leaves a node alone if its operator's contract does not list one of its inputs,
  // outputs or attributes, and reports it as a miss: a rule that fuses the node would drop that
  // part. It does the same with a node that lacks a required input, because rules would read it.
  void leave_unknown(std::span<const Contract> contracts);

  // Calls visit(node) for each node of the operator, in order. `visit` may change the node, and
  // other nodes that it gets from the functions below.
  void each(std::string_view op_type, std::string_view domain,
            const std::function<void(Node&)>& visit);

  // The node that makes the value; null if there is none, or if leave_unknown excludes it.
  Node* producer(std::string_view value);
  // The same, or null if the node is of another operator.
  Node* producer(std::string_view value, std::string_view op_type, std::string_view domain);
  // The same, or null unless `value` is the node's first output and has exactly one reader.
  Node* only_producer(std::string_view value, std::string_view op_type, std::string_view domain);
  // The number of node inputs that are this value. Nodes with unneeded results do not count, and an
  // output of the graph counts as one.
  std::size_t readers(std::string_view value);
  // `name`, with a number appended if a value has that name already.
  std::string unique_name(const std::string& name);

  void insert_before(const Node& node, Node inserted);
  // Makes nodes that read the value of a name read the other value.
  void replace(const std::unordered_map<std::string, Value>& values);

  // Must be called after the inputs or outputs of nodes were changed.
  void changed() { known_ = false; }
  // The nodes in order, without those whose outputs are all unread.
  std::vector<Node> take();

  void applied(std::string_view rule) { ++report_.applied[std::string(rule)]; }
  void missed(std::string_view rule, const Node& node, std::string reason);
  // The same for a node that is damaged (Report::damage).
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

// The elements of a constant of int64 or int32; empty if `value` is no such constant.
std::vector<std::int64_t> constant_integers(const Value* value);

// "[0, -1, 16]".
std::string text_of(const std::vector<std::int64_t>& integers);

}  // namespace flownpu::lowering
