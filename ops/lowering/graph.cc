// SPDX-License-Identifier: Apache-2.0
#include "ops/lowering/graph.h"

#include <algorithm>
#include <iterator>
#include <ranges>
#include <utility>

namespace flownpu::lowering {

Graph::Graph(std::vector<Node> nodes, const std::vector<std::string>& outputs,
             const std::vector<std::string>& taken)
    : nodes_(std::make_move_iterator(nodes.begin()), std::make_move_iterator(nodes.end())),
      outputs_(outputs.begin(), outputs.end()),
      taken_(taken.begin(), taken.end()) {}

void Graph::leave_unknown(std::span<const Contract> contracts) {
  for (const Node& node : nodes_) {
    std::string part = unknown_part(contracts, node);
    if (part.empty()) continue;
    left_.insert(&node);
    missed("signature", node, std::move(part));
  }
}

void Graph::damaged(std::string_view rule, const Node& node, const std::string& reason) {
  report_.damage.push_back(to_string(node) + ": " + reason);
  missed(rule, node, reason);
}

void Graph::missed(std::string_view rule, const Node& node, std::string reason) {
  report_.misses.push_back(
      {std::string(rule), node.name.empty() ? node.op_type : node.name, std::move(reason)});
}

void Graph::look() {
  if (known_) return;
  producers_.clear();
  readers_.clear();
  for (const std::string& output : outputs_) ++readers_[output];
  // Goes backwards, as take() does: a node with unread outputs does not count as a reader.
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
    if (node.op_type == op_type && node.domain == domain && !left_.contains(&node)) visit(node);
  }
}

Node* Graph::producer(std::string_view value) {
  look();
  const auto found = producers_.find(value);
  return found == producers_.end() || left_.contains(found->second) ? nullptr : found->second;
}

Node* Graph::producer(std::string_view value, std::string_view op_type, std::string_view domain) {
  Node* node = producer(value);
  return node != nullptr && node->op_type == op_type && node->domain == domain ? node : nullptr;
}

Node* Graph::only_producer(std::string_view value, std::string_view op_type,
                           std::string_view domain) {
  Node* node = producer(value, op_type, domain);
  const bool fits = node != nullptr && node->outputs[0].name == value && readers(value) == 1;
  return fits ? node : nullptr;
}

std::string Graph::unique_name(const std::string& name) {
  look();
  std::string unique = name;
  for (int number = 1;
       producers_.contains(unique) || readers_.contains(unique) || taken_.contains(unique);
       ++number) {
    unique = name + "_" + std::to_string(number);
  }
  taken_.insert(unique);
  return unique;
}

std::size_t Graph::readers(std::string_view value) {
  look();
  const auto found = readers_.find(value);
  return found == readers_.end() ? 0 : found->second;
}

void Graph::insert_before(const Node& node, Node inserted) {
  const auto place =
      std::ranges::find_if(nodes_, [&](const Node& other) { return &other == &node; });
  nodes_.insert(place, std::move(inserted));
  changed();
}

void Graph::replace(const std::unordered_map<std::string, Value>& values) {
  for (Node& node : nodes_) {
    for (Value& input : node.inputs) {
      const auto found = values.find(input.name);
      if (found != values.end()) input = found->second;
    }
  }
  changed();
}

// Goes backwards, so that nodes read only by removed nodes are removed as well.
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
    kept.push_back(*node);  // a copy: `read` points to the names
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

std::string text_of(const std::vector<std::int64_t>& integers) {
  std::string text = "[";
  for (const std::int64_t integer : integers)
    text += (text.size() > 1 ? ", " : "") + std::to_string(integer);
  return text + "]";
}

}  // namespace flownpu::lowering
