// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/operators/lowering.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <utility>

#include "ops/gpu/operators/step.h"
#include "ops/transformer/graph/operators.h"

namespace flownpu::gpu {
namespace {

// An operator alone has the device's domain, this letter, and the domain that it has in the graph.
constexpr char kOf = ':';

bool keeps_cache(const Node& node) {
  constexpr std::size_t kPastOfOnnx = 4;
  if (transformer::is_paged_attention(node)) return true;
  const bool is_onnx = node.domain.empty() && node.op_type == "Attention";
  if (!is_onnx && !transformer::is_attention(node)) return false;
  return node.input(is_onnx ? kPastOfOnnx : std::size_t{kPastKey}) != nullptr ||
         std::ranges::any_of(
             node.outputs.begin() + std::min<std::ptrdiff_t>(1, std::ssize(node.outputs)),
             node.outputs.end(), [](const Value& present) { return !present.name.empty(); });
}

bool is_heavy(const Node& node) {
  const Operator* found = find_operator(node.domain, node.op_type);
  return found != nullptr && found->is_heavy;
}

Node copy_of(const Value& value, std::string name) {
  constexpr int kWithAllFloats = 13;  // the first version of Identity that takes bfloat16
  Value copied = value;
  copied.name = std::move(name);
  return {.name = copied.name,
          .op_type = "Identity",
          .domain = std::string(kGpuDomain) + kOf,
          .since_version = kWithAllFloats,
          .attributes = {},
          .inputs = {value},
          .outputs = {copied}};
}

// Only a run knows the memory of a session's input, so each kernel that reads it would take it to
// the device. An input that several kernels read is copied once here, like the text that a
// diffusion model's layers attend to.
void share_inputs(std::vector<Node>& nodes) {
  std::set<std::string, std::less<>> made;
  std::map<std::string, std::vector<Value*>, std::less<>> readers;
  for (Node& node : nodes) {
    for (const Value& output : node.outputs) made.insert(output.name);
    if (!is_operator_alone(node)) continue;
    for (Value& input : node.inputs) {
      if (!input.name.empty() && input.constant == nullptr && !made.contains(input.name) &&
          refused_floats(copy_of(input, "")).empty())
        readers[input.name].push_back(&input);
    }
  }
  std::vector<Node> copies;
  for (const auto& [name, values] : readers) {
    if (values.size() == 1) continue;
    copies.push_back(copy_of(*values.front(), name + ", on the device"));
    for (Value* value : values) value->name = copies.back().outputs.front().name;
  }
  nodes.insert(nodes.begin(), std::make_move_iterator(copies.begin()),
               std::make_move_iterator(copies.end()));
}

}  // namespace

bool is_operator_alone(const Node& node) {
  return node.domain.starts_with(kGpuDomain) && node.domain.size() > kGpuDomain.size();
}

Node operator_of_graph(const Node& node) {
  Node of_graph = node;
  of_graph.domain = node.domain.substr(kGpuDomain.size() + 1);
  return of_graph;
}

bool is_without_cache(const std::vector<Node>& nodes) {
  return std::ranges::any_of(nodes, is_heavy) && std::ranges::none_of(nodes, keeps_cache);
}

Lowered lower_operators(std::vector<Node> nodes) {
  Lowered lowered;
  std::set<std::string, std::less<>> on_device;  // names of values
  for (Node& node : nodes) {
    const Operator* found = find_operator(node.domain, node.op_type);
    const auto is_there = [&](const Value& value) { return on_device.contains(value.name); };
    if (found == nullptr || !(found->is_heavy || std::ranges::any_of(node.inputs, is_there)))
      continue;
    if (const std::string reason = found->refused(node); !reason.empty()) {
      lowered.on_host.push_back({node.name, node.op_type, reason});
      continue;
    }
    node.domain = std::string(kGpuDomain) + kOf + node.domain;
    for (const Value& output : node.outputs) on_device.insert(output.name);
  }
  share_inputs(nodes);
  lowered.nodes = std::move(nodes);
  return lowered;
}

std::string describe_operators(const std::vector<Node>& nodes) {
  return std::to_string(std::ranges::count_if(nodes, is_operator_alone)) + " of " +
         std::to_string(nodes.size()) + " steps on the device";
}

}  // namespace flownpu::gpu
