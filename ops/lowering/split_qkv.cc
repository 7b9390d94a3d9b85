// SPDX-License-Identifier: Apache-2.0
// The attention reads packed query, key and value in place, without a Split:
//
//   FlowQKVAttention(*Split(packed, [H d, G d, G d]; axis = -1), ..)
//       -> FlowQKVAttention(packed, -, -, ..)
#include <string>
#include <utility>
#include <vector>

#include "ops/lowering/lowering.h"
#include "ops/nodes/flow_qkv_attention.h"

namespace flownpu::lowering {
namespace {

// The Split whose three outputs are query, key and value; null if there is none.
const Node* split_of(Graph& graph, const Node& node) {
  if (node.input(kKey) == nullptr || node.input(kValue) == nullptr) return nullptr;
  const Node* split = graph.producer(node.inputs[kQuery].name, "Split", "");
  if (split == nullptr || split->outputs.size() != 3) return nullptr;
  for (const AttentionInput input : {kQuery, kKey, kValue}) {
    if (node.inputs[input].name != split->outputs[input].name) return nullptr;
  }
  return split;
}

// Why the Split's parts are not the query, key and value of the attention's heads; empty if they
// are.
std::string obstacle_of(const Node& node, const Node& split) {
  const std::int64_t d = node.required_integer("head_size");
  const std::int64_t query = node.required_integer("num_heads") * d;
  const std::int64_t key = node.required_integer("kv_num_heads") * d;
  const std::vector<std::int64_t> sizes = constant_integers(split.input(1));
  if (const std::vector expected{query, key, key}; sizes != expected) {
    return "Split into " + text_of(sizes) + ", expected " + text_of(expected) +
           ": Q, K and V of the attention's heads";
  }
  const std::int64_t axis = split.integer("axis", 0);
  if (axis != -1 && axis != 2)
    return "Split along axis " + std::to_string(axis) + ", expected the last one";
  return "";
}

}  // namespace

void split_qkv(Graph& graph) {
  graph.each("FlowQKVAttention", kDomain, [&](Node& node) {
    const Node* split = split_of(graph, node);
    if (split == nullptr) return;
    if (std::string reason = obstacle_of(node, *split); !reason.empty())
      return graph.missed("split_qkv", node, std::move(reason));
    node.inputs[kQuery] = split->inputs[0];
    node.inputs[kKey] = node.inputs[kValue] = Value{};
    graph.applied("split_qkv");
    graph.changed();
  });
}

}  // namespace flownpu::lowering
