// SPDX-License-Identifier: Apache-2.0
// Products that ONNX Runtime's quantiser made dynamic, with weights whose zero points are 0:
//
//   Mul(Cast(MatMulInteger(q, W, z)), Mul(s, scale)) with q, s, z = DynamicQuantizeLinear(X)
//                                                        -> DenseMatMul(X, W, scale)
//
// whose activations are rounded as its own are: to int8 with a scale for each 128 of a row, where
// DynamicQuantizeLinear has one for all of X.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "ops/lowering/lowering.h"

namespace flownpu::lowering {
namespace {

// Makes `node`, the Mul of a product by the scales, a DenseMatMul.
void become_dynamic(Graph& graph, Node& node, const Value& sums, const Value& scales) {
  const Node* cast = graph.only_producer(sums.name, "Cast", "");
  const Node* scaling = graph.producer(scales.name, "Mul", "");
  if (cast == nullptr || scaling == nullptr) return;
  const Node* product = graph.only_producer(cast->inputs[0].name, "MatMulInteger", "");
  if (product == nullptr || product->input(2) == nullptr || !is_zero(product->input(3))) return;
  const Node* quantised = graph.producer(product->inputs[0].name, "DynamicQuantizeLinear", "");
  const Value& weight = product->inputs[1];
  if (quantised == nullptr || product->inputs[2].name != quantised->outputs[2].name ||
      weight.constant == nullptr || weight.type != DataType::kInt8 || !weight.shape) {
    return;
  }
  for (const std::size_t side : {0, 1}) {
    if (scaling->inputs[side].name != quantised->outputs[1].name) continue;
    const Value scale = columns_of(graph, scaling->inputs[1 - side], (*weight.shape)[1]);
    if (scale.name.empty()) return;
    node.inputs = {quantised->inputs[0], weight, scale, {}, {}};
    node.op_type = "DenseMatMul";
    node.domain = kDomain;
    node.since_version = 1;
    node.attributes = {{"transposed", std::int64_t{0}}};
    graph.changed();
    return;
  }
}

}  // namespace

bool is_zero(const Value* zeros) {
  if (zeros == nullptr) return true;
  if (zeros->constant == nullptr || !zeros->shape || zeros->type != DataType::kInt8) return false;
  const auto* points = static_cast<const std::int8_t*>(zeros->constant);
  return std::all_of(points, points + zeros->shape->elements(), [](int point) { return !point; });
}

Value columns_of(Graph& graph, const Value& scale, std::int64_t columns) {
  if (scale.constant == nullptr || !scale.shape || scale.type != DataType::kFloat32 ||
      columns == 0) {
    return {};
  }
  const std::int64_t given = scale.shape->elements();
  if (given == columns && scale.shape->rank() > 0 && (*scale.shape)[-1] == columns) return scale;
  if (given != 1) return {};
  const auto values = std::make_shared<std::vector<float>>(
      static_cast<std::size_t>(columns), *static_cast<const float*>(scale.constant));
  return {graph.unique_name(scale.name + "_columns"), DataType::kFloat32, Shape{columns},
          values->data(), values};
}

void dynamic_product(Graph& graph) {
  graph.each("Mul", "", [&](Node& node) {
    for (const std::size_t side : {0, 1}) {
      if (node.op_type != "Mul") return;
      const Value sums = node.inputs[side];
      const Value scales = node.inputs[1 - side];
      become_dynamic(graph, node, sums, scales);
    }
  });
}

}  // namespace flownpu::lowering
