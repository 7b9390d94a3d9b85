// SPDX-License-Identifier: Apache-2.0
// FastGelu(x) -> Gelu(x; approximate = "tanh"): the same function.
#include <string>

#include "ops/lowering/lowering.h"

namespace flownpu::lowering {

std::string fast_gelu_obstacle(const Node& node) {
  return node.input(1) == nullptr ? "" : "a bias is given: Gelu has none";
}

void fast_gelu(Graph& graph) {
  graph.each("FastGelu", "com.microsoft", [](Node& node) {
    if (!fast_gelu_obstacle(node).empty()) return;
    node.op_type = "Gelu";
    node.domain.clear();
    node.since_version = 20;  // of ONNX, the first with Gelu
    node.attributes = {{"approximate", std::string("tanh")}};
  });
}

}  // namespace flownpu::lowering
