// SPDX-License-Identifier: Apache-2.0
#include "ops/transformer/graph/walk.h"

#include <algorithm>

#include "ops/error.h"

namespace flownpu::transformer {

GraphWalk::GraphWalk(const std::vector<Node>& nodes, const std::vector<std::string>& outputs)
    : outputs_(outputs.begin(), outputs.end()) {
  for (const Node& node : nodes) {
    for (const Value& output : node.outputs) {
      if (!output.name.empty()) producers_.emplace(output.name, &node);
    }
    for (const Value& input : node.inputs) {
      if (!input.name.empty()) readers_[input.name].push_back(&node);
    }
  }
}

const Node* GraphWalk::producer(std::string_view value) const {
  const auto found = producers_.find(value);
  return found == producers_.end() ? nullptr : found->second;
}

const std::vector<const Node*>& GraphWalk::readers(std::string_view value) const {
  static const std::vector<const Node*> none;
  const auto found = readers_.find(value);
  return found == readers_.end() ? none : found->second;
}

const Node& GraphWalk::only(const std::vector<const Node*>& all, std::string_view value,
                            std::string_view expected) const {
  if (all.size() == 1 && !outputs_.contains(value)) return *all.front();
  const Node* made_by = producer(value);
  fail(made_by == nullptr ? "the graph" : to_string(*made_by), ": expected '", value,
       "' to be read by one node, ", expected, ", got ", all.size(), " that read it",
       outputs_.contains(value) ? ", and an output of the graph" : "");
}

const Node& GraphWalk::only_reader(std::string_view value, std::string_view expected) const {
  return only(readers(value), value, expected);
}

const Node& GraphWalk::only_computing_reader(std::string_view value,
                                             std::string_view expected) const {
  std::vector<const Node*> computing;
  for (const Node* node : readers(value)) {
    if (node->op_type != "Shape" || !node->domain.empty()) computing.push_back(node);
  }
  return only(computing, value, expected);
}

std::string_view GraphWalk::value_through_reshapes(std::string_view value) const {
  const Node* node = producer(value);
  while (node != nullptr && node->domain.empty() &&
         (node->op_type == "Cast" || node->op_type == "Reshape" || node->op_type == "Unsqueeze")) {
    value = node->inputs[0].name;
    node = producer(value);
  }
  return value;
}

std::vector<Node> with_one_node(const std::vector<Node>& nodes, const GraphWalk& graph,
                                const std::unordered_set<const Node*>& taken, const Node* last,
                                const Node& one, const std::vector<std::string>& outputs) {
  std::unordered_set<std::string_view> needed(outputs.begin(), outputs.end());
  for (const Value& input : one.inputs) needed.insert(input.name);
  std::unordered_set<std::string_view> computed;
  for (const Value& output : one.outputs) computed.insert(output.name);
  std::vector<Node> rest;
  for (auto node = nodes.rbegin(); node != nodes.rend(); ++node) {
    if (&*node == last) rest.push_back(one);
    if (taken.contains(&*node)) continue;
    // A value that no node reads leaves the partition.
    const auto wanted = [&](const Value& value) {
      return !value.name.empty() &&
             (needed.contains(value.name) || graph.readers(value.name).empty());
    };
    if (std::ranges::none_of(node->outputs, wanted)) continue;
    for (const Value& input : node->inputs) {
      needed.insert(input.name);
      const Node* made_by = graph.producer(input.name);
      if (made_by != nullptr && taken.contains(made_by) && !computed.contains(input.name)) {
        fail(to_string(*node), ": expected that nothing else reads '", input.name,
             "', which is inside the layers");
      }
    }
    rest.push_back(*node);
  }
  std::ranges::reverse(rest);
  return rest;
}

void check_last_token(const GraphWalk& graph, const Node& selection,
                      std::string_view tokens_before_last) {
  const auto refuse = [&](const char* what) {
    fail(to_string(selection),
         ": expected it to select the last token, min(seqlens_k, S - 1): ", what);
  };
  if (selection.integer("batch_dims", 0) != 1) refuse("batch_dims is not 1");
  const Node* minimum = graph.producer_through_reshapes(selection.inputs[1].name);
  if (minimum == nullptr || minimum->op_type != "Min" || minimum->inputs.size() != 2)
    refuse("its index is no Min of two values");
  const std::string_view length = graph.value_through_reshapes(tokens_before_last);
  bool has_length = false;
  bool has_newest = false;
  for (const Value& input : minimum->inputs) {
    const std::string_view value = graph.value_through_reshapes(input.name);
    has_length = has_length || value == length;
    const Node* difference = graph.producer(value);
    if (difference == nullptr || difference->op_type != "Sub") continue;
    const Node* tokens = graph.producer(difference->inputs[0].name);
    const Value& one = difference->inputs[1];
    has_newest =
        has_newest ||
        (tokens != nullptr && tokens->op_type == "Shape" && tokens->integer("start", 0) == 1 &&
         tokens->integer("end", 0) == 2 && one.constant != nullptr &&
         one.type == DataType::kInt64 && one.shape && one.shape->elements() == 1 &&
         *static_cast<const std::int64_t*>(one.constant) == 1);
  }
  if (!has_length) refuse("seqlens_k is not in it");
  if (!has_newest) refuse("Shape(.., start = 1, end = 2) - 1 is not in it");
}

}  // namespace flownpu::transformer
