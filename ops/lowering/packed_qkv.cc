// SPDX-License-Identifier: Apache-2.0
// One product reads the activations once and writes query, key and value side by side:
//
//   FlowQKVAttention(Q4NXMatMul(X, Wq), Q4NXMatMul(X, Wk), Q4NXMatMul(X, Wv), ..)
//       -> FlowQKVAttention(Q4NXMatMul(X, [Wq; Wk; Wv]), -, -, ..)
//
// The weights are stacked by whole blocks of 32 rows: rows of Wq and Wk must fill theirs.
#include <array>
#include <optional>
#include <utility>

#include "ops/lowering/lowering.h"
#include "ops/q4nx.h"

namespace flownpu::lowering {

void packed_qkv(Graph& graph, RepackedWeights& weights) {
  graph.each("FlowQKVAttention", kDomain, [&](Node& node) {
    const std::int64_t d = node.required_integer("head_size");
    const std::int64_t keys = node.required_integer("kv_num_heads") * d;
    const std::array<std::int64_t, 3> widths{node.required_integer("num_heads") * d, keys, keys};
    std::array<Node*, 3> projections{};
    std::int64_t rows = 0;
    for (std::size_t i = 0; i < 3; ++i) {
      if (node.input(i) == nullptr) return;
      Node* projection = graph.only_producer(node.inputs[i].name, "Q4NXMatMul", kDomain);
      if (projection == nullptr || projection->inputs.size() != 2 ||
          projection->text("gating", "none") != "none" ||
          (i > 0 && projection->inputs[0].name != projections[0]->inputs[0].name)) {
        return;
      }
      const std::int64_t m = projection->required_integer("M");
      if (m != widths[i] || (i < 2 && m % q4nx::kBlockRows != 0)) return;
      projections[i] = projection;
      rows += m;
    }
    std::optional<Value> weight = weights.join({projections.begin(), projections.end()});
    if (!weight) return;
    // The last of them comes after the others, and before whoever reads it.
    Node& packed = *projections[2];
    packed.inputs[1] = std::move(*weight);
    packed.attributes.insert_or_assign("M", rows);
    if (packed.outputs[0].shape) (*packed.outputs[0].shape)[-1] = rows;
    node.inputs[0] = packed.outputs[0];
    node.inputs[1] = node.inputs[2] = Value{};
    graph.changed();
  });
}

}  // namespace flownpu::lowering
