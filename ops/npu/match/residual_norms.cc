// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/match/residual_norms.h"

#include <algorithm>
#include <string>
#include <unordered_map>
#include <utility>

#include "ops/transformer/graph/operators.h"

namespace flownpu::npu {
namespace {

bool may_be_stream(const Value& value) {
  return value.constant == nullptr && !value.name.empty() &&
         (!value.shape || value.shape->rank() == 3);
}

bool is_stream_norm(const Node& node) {
  const std::int64_t axis = node.integer("axis", -1);
  return transformer::is_norm(node) && node.inputs.size() == 2 &&
         node.inputs[1].constant != nullptr && node.outputs.size() == 1 &&
         (axis == -1 || axis == 2);
}

}  // namespace

std::vector<Node> with_residual_norms(std::vector<Node> nodes) {
  std::unordered_map<std::string, Node*> sums;
  for (Node& node : nodes) {
    if (transformer::is(node, "", "Add") && std::ranges::all_of(node.inputs, may_be_stream))
      sums.emplace(node.outputs[0].name, &node);
  }
  std::vector<Node> kept;
  std::vector<const Node*> joined;
  for (Node& norm : nodes) {
    const auto sum = is_stream_norm(norm) ? sums.find(norm.inputs[0].name) : sums.end();
    if (sum == sums.end()) continue;
    // It takes the place of the Add, before all that reads the sum.
    Node& add = *sum->second;
    Node both;
    both.name = norm.name;
    both.op_type = "SkipSimplifiedLayerNormalization";
    both.domain = transformer::kMicrosoft;
    both.since_version = 1;
    both.attributes = {{"epsilon", norm.number("epsilon", 1e-5F)}};
    both.inputs = {add.inputs[0], add.inputs[1], norm.inputs[1]};
    both.outputs = {norm.outputs[0], Value{}, Value{}, add.outputs[0]};
    sums.erase(sum);
    add = std::move(both);
    joined.push_back(&norm);
  }
  for (Node& node : nodes) {
    if (std::ranges::find(joined, &node) == joined.end()) kept.push_back(std::move(node));
  }
  return kept;
}

}  // namespace flownpu::npu
