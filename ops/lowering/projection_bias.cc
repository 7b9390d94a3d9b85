// SPDX-License-Identifier: Apache-2.0
// Moves the Add of a bias into the projection:
//
//   Add(Q4NXMatMul(X, W), b)  ->  Q4NXMatMul(X, W, b)      b: a constant [M]
#include <string>
#include <vector>

#include "ops/lowering/lowering.h"
#include "ops/nodes/q4nx_matmul.h"

namespace flownpu::lowering {
namespace {

bool is_bias(const Value& value, const Node& projection) {
  return value.constant != nullptr && value.type == DataType::kFloat32 && value.shape &&
         *value.shape == Shape{projection.required_integer("M")};
}

}  // namespace

void projection_bias(Graph& graph) {
  graph.each("Add", "", [&](Node& node) {
    if (node.inputs.size() != 2 || node.outputs.size() != 1) return;
    for (const std::size_t side : {0, 1}) {
      const Node* projection = graph.only_producer(node.inputs[side].name, "Q4NXMatMul", kDomain);
      const Value& bias = node.inputs[1 - side];
      if (projection == nullptr || !epilogue_of(*projection, false).empty() ||
          !is_bias(bias, *projection)) {
        continue;
      }
      // The product takes the place and the output of the Add, which comes after all inputs of the
      // product.
      Node biased = *projection;
      biased.inputs.resize(kProductBias + 1);
      biased.inputs[kProductBias] = bias;
      biased.outputs = node.outputs;
      node = std::move(biased);
      graph.changed();
      return graph.applied("projection_bias");
    }
  });
}

}  // namespace flownpu::lowering
