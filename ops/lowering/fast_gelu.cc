// SPDX-License-Identifier: Apache-2.0
// FastGelu(x) -> Gelu(x; approximate = "tanh"): the same function.
#include <string>

#include "ops/lowering/lowering.h"

namespace flownpu::lowering {
namespace {

constexpr Port kInputs[] = {
    {.name = "X", .types = kFloat},
    optional({.name = "bias", .types = kNone, .advice = "Gelu, which it becomes, has no bias"})};
constexpr Port kOutputs[] = {{.name = "Y", .types = kFloat}};

}  // namespace

constexpr Contract kFastGelu{"com.microsoft", "FastGelu", 1, 1, kInputs, kOutputs};

void fast_gelu(Graph& graph) {
  graph.each("FastGelu", "com.microsoft", [](Node& node) {
    if (!violation(kFastGelu, node).empty()) return;
    node.op_type = "Gelu";
    node.domain.clear();
    node.since_version = 20;  // the first ONNX version with Gelu
    node.attributes = {{"approximate", std::string("tanh")}};
  });
}

}  // namespace flownpu::lowering
