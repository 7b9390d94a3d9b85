// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/operators/lowering.h"

#include <algorithm>
#include <utility>

#include "ops/gpu/operators/step.h"
#include "ops/transformer/graph/operators.h"

namespace flownpu::gpu {
namespace {

bool is_product(const Node& node) {
  return transformer::is_projection(node) || transformer::is_dense_product(node);
}

bool keeps_cache(const Node& node) {
  return node.input(kPastKey) != nullptr ||
         std::ranges::any_of(
             node.outputs.begin() + std::min<std::ptrdiff_t>(1, std::ssize(node.outputs)),
             node.outputs.end(), [](const Value& present) { return !present.name.empty(); });
}

}  // namespace

bool is_operator_alone(const Node& node) {
  return node.domain == kGpuDomain && find_operator(node.op_type) != nullptr;
}

Node operator_of_graph(const Node& node) {
  Node of_graph = node;
  of_graph.domain = kDomain;
  return of_graph;
}

bool is_without_cache(const std::vector<Node>& nodes) {
  return std::ranges::any_of(nodes,
                             [](const Node& node) {
                               return is_product(node) || transformer::is_attention(node);
                             }) &&
         std::ranges::none_of(nodes, [](const Node& node) {
           return transformer::is_attention(node) && keeps_cache(node);
         });
}

Lowered lower_operators(std::vector<Node> nodes) {
  Lowered lowered;
  for (Node& node : nodes) {
    const bool attends = transformer::is_attention(node);
    if (!attends && !is_product(node)) continue;
    const std::string reason = attends ? refused_attention(node) : "";
    if (!reason.empty()) {
      lowered.on_host.push_back({node.name, node.op_type, reason});
    } else {
      node.domain = kGpuDomain;
    }
  }
  lowered.nodes = std::move(nodes);
  return lowered;
}

std::string describe_operators(const std::vector<Node>& nodes) {
  const auto all = std::ranges::count_if(nodes, is_operator_alone);
  const auto attentions = std::ranges::count_if(nodes, [](const Node& node) {
    return is_operator_alone(node) && transformer::is_attention(operator_of_graph(node));
  });
  return std::to_string(all - attentions) + " products and " + std::to_string(attentions) +
         " attentions one by one";
}

}  // namespace flownpu::gpu
