// SPDX-License-Identifier: Apache-2.0
// FlowQKVAttention(*Split(packed, [H d, G d, G d]; axis = -1), ..) -> FlowQKVAttention(packed, -,
// -, ..)
#include <vector>

#include "ops/lowering/lowering.h"

namespace flownpu::lowering {

void split_qkv(Graph& graph) {
  graph.each("FlowQKVAttention", kDomain, [&](Node& node) {
    if (node.input(1) == nullptr || node.input(2) == nullptr) return;
    const Node* split = graph.producer(node.inputs[0].name);
    if (split == nullptr || split->op_type != "Split" || !split->domain.empty() ||
        split->outputs.size() != 3) {
      return;
    }
    for (std::size_t i = 0; i < 3; ++i) {
      if (node.inputs[i].name != split->outputs[i].name) return;
    }
    const std::int64_t d = node.required_integer("head_size");
    const std::int64_t query = node.required_integer("num_heads") * d;
    const std::int64_t key = node.required_integer("kv_num_heads") * d;
    const std::int64_t axis = split->integer("axis", 0);
    if (constant_integers(split->input(1)) != std::vector{query, key, key} ||
        (axis != -1 && axis != 2)) {
      return;
    }
    node.inputs[0] = split->inputs[0];
    node.inputs[1] = node.inputs[2] = Value{};
    graph.changed();
  });
}

}  // namespace flownpu::lowering
