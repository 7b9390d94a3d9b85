// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/operators/lowering.h"

#include <algorithm>
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
  lowered.nodes = std::move(nodes);
  return lowered;
}

std::string describe_operators(const std::vector<Node>& nodes) {
  return std::to_string(std::ranges::count_if(nodes, is_operator_alone)) + " of " +
         std::to_string(nodes.size()) + " steps on the device";
}

}  // namespace flownpu::gpu
