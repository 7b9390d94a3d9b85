// SPDX-License-Identifier: Apache-2.0
#include "ops/lowering/graph.h"

#include <algorithm>
#include <iterator>
#include <ranges>
#include <utility>

namespace flownpu::lowering {

Graph::Graph(std::vector<Node> nodes, const std::vector<std::string>& outputs)
    : nodes_(std::make_move_iterator(nodes.begin()), std::make_move_iterator(nodes.end())),
      outputs_(outputs.begin(), outputs.end()) {}

void Graph::look() {
  if (known_) return;
  producers_.clear();
  readers_.clear();
  for (const std::string& output : outputs_) ++readers_[output];
  // Backwards, as in take(): what a rule has left without readers is no reader itself.
  for (Node& node : std::views::reverse(nodes_)) {
    bool is_read = false;
    for (const Value& output : node.outputs) {
      if (output.name.empty()) continue;
      producers_[output.name] = &node;
      is_read = is_read || readers_.contains(output.name);
    }
    if (!is_read) continue;
    for (const Value& input : node.inputs) {
      if (!input.name.empty()) ++readers_[input.name];
    }
  }
  known_ = true;
}

void Graph::each(std::string_view op_type, std::string_view domain,
                 const std::function<void(Node&)>& visit) {
  for (Node& node : nodes_) {
    if (node.op_type == op_type && node.domain == domain) visit(node);
  }
}

Node* Graph::producer(std::string_view value) {
  look();
  const auto found = producers_.find(value);
  return found == producers_.end() ? nullptr : found->second;
}

Node* Graph::only_producer(std::string_view value, std::string_view op_type,
                           std::string_view domain) {
  Node* node = producer(value);
  const bool fits = node != nullptr && node->op_type == op_type && node->domain == domain &&
                    node->outputs[0].name == value && readers(value) == 1;
  return fits ? node : nullptr;
}

std::size_t Graph::readers(std::string_view value) {
  look();
  const auto found = readers_.find(value);
  return found == readers_.end() ? 0 : found->second;
}

// Backwards, so that what only a node without readers reads is found to have none as well.
std::vector<Node> Graph::take() {
  std::unordered_set<std::string_view> read(outputs_.begin(), outputs_.end());
  std::vector<Node> kept;
  for (auto node = nodes_.rbegin(); node != nodes_.rend(); ++node) {
    const bool is_read = std::ranges::any_of(
        node->outputs, [&](const Value& output) { return read.contains(output.name); });
    if (!is_read) continue;
    for (const Value& input : node->inputs) {
      if (!input.name.empty()) read.insert(input.name);
    }
    kept.push_back(*node);  // A copy: `read` looks at the names.
  }
  std::ranges::reverse(kept);
  return kept;
}

Value input_or_none(const Node& node, std::size_t index) {
  const Value* value = node.input(index);
  return value == nullptr ? Value{} : *value;
}

std::vector<std::int64_t> constant_integers(const Value* value) {
  if (value == nullptr || value->constant == nullptr || !value->shape) return {};
  const auto count = static_cast<std::size_t>(value->shape->elements());
  if (value->type == DataType::kInt64) {
    const auto* data = static_cast<const std::int64_t*>(value->constant);
    return {data, data + count};
  }
  if (value->type == DataType::kInt32) {
    const auto* data = static_cast<const std::int32_t*>(value->constant);
    return {data, data + count};
  }
  return {};
}

}  // namespace flownpu::lowering
