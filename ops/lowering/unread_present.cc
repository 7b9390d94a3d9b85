// SPDX-License-Identifier: Apache-2.0
// Drops unread outputs present_key and present_value of FlowQKVAttention(causal = 0). An encoder
// has such outputs, because it has no KV cache.
#include "ops/lowering/lowering.h"

namespace flownpu::lowering {

void unread_present(Graph& graph) {
  graph.each("FlowQKVAttention", kDomain, [&](Node& node) {
    if (node.integer("causal", 1) != 0) return;
    for (std::size_t i = 1; i < node.outputs.size(); ++i) {
      if (graph.readers(node.outputs[i].name) == 0) node.outputs[i].name.clear();
    }
    graph.changed();
  });
}

}  // namespace flownpu::lowering
