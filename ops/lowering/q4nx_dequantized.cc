// SPDX-License-Identifier: Apache-2.0
// Products and tables whose weight is a DequantizeLinear of constant codes of 4 or 8 bits, in one
// scale, one a row, or blocks of a multiple of 32 along K, with 4 bits also of 16:
//
//   MatMul(X, W'), W' = DequantizeLinear(codes [K,M], ..), or Transpose of one of [M,K]
//                                              -> Q4NXMatMul(X, W; M, K)
//   Gemm(X, W', C), its B transposed or not    -> Add(Q4NXMatMul(X, W; M, K), C)
//   Gather(DequantizeLinear(codes [M,K], ..), indices), of rows
//                                              -> Q4NXGather(W, indices; M, K)
//
// A session leaves 8 bits without blocks to DenseMatMul, whose codes then stay int8 without a scale
// for each 32; conversion takes them, because only weights in Q4NX run on all devices.
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ops/formats/q4nx.h"
#include "ops/lowering/lowering.h"

namespace flownpu::lowering {
namespace {

constexpr std::string_view kRule = "q4nx_dequantized";

// The weight [M,K] that a DequantizeLinear of [M,K], or transposed of [K,M], makes; nothing if the
// codes are no constant matrix of 4 or 8 bits in float32, or a scale spans something else than a
// row's neighbours. `whole_rows`: whether to take 8 bits without blocks.
std::optional<QuantizedWeight> weight_of(const Node& node, bool transposed, bool whole_rows) {
  const Value* codes = node.input(0);
  const Value* scales = node.input(1);
  if (codes == nullptr || !codes->shape || codes->shape->rank() != 2 || scales == nullptr ||
      scales->type != DataType::kFloat32 || !scales->shape) {
    return std::nullopt;
  }
  const bool is_byte = codes->type == DataType::kInt8 || codes->type == DataType::kUInt8;
  if (!is_byte && !is_packed(codes->type)) return std::nullopt;
  const std::int64_t rows = (*codes->shape)[transposed ? 1 : 0];
  const std::int64_t columns = (*codes->shape)[transposed ? 0 : 1];
  const std::int64_t given = node.integer("axis", 1);
  const bool is_along_row = (given < 0 ? given + 2 : given) == (transposed ? 0 : 1);
  std::int64_t block_size = node.integer("block_size", 0);
  if (is_byte && block_size == 0 && !whole_rows) return std::nullopt;
  const bool is_one = block_size == 0 && scales->shape->elements() == 1;
  if (!is_one && is_along_row != (block_size > 0)) return std::nullopt;
  if (block_size == 0) block_size = q4nx::ceil_div(columns, q4nx::kGroup) * q4nx::kGroup;
  return QuantizedWeight{.codes = *codes,
                         .scales = *scales,
                         .zero_points = input_or_none(node, 2),
                         .rows = rows,
                         .columns = columns,
                         .block_size = block_size,
                         .bits = is_byte ? 8 : 4,
                         .of_onnx_types = true,
                         .transposed = transposed};
}

// The weight behind a node's input, which reads W[M,K], or transposed W[K,M].
std::optional<QuantizedWeight> weight_behind(Graph& graph, const Node& node, std::size_t input,
                                             bool transposed, bool whole_rows) {
  const Node* maker = graph.producer(node.inputs[input].name);
  if (maker != nullptr && maker->op_type == "Transpose" && maker->domain.empty()) {
    const std::vector<std::int64_t> order = maker->integers("perm");
    if (!order.empty() && order != std::vector<std::int64_t>{1, 0}) return std::nullopt;
    transposed = !transposed;
    maker = graph.producer(maker->inputs[0].name);
  }
  if (maker == nullptr || maker->op_type != "DequantizeLinear" || !maker->domain.empty())
    return std::nullopt;
  std::optional<QuantizedWeight> weight = weight_of(*maker, transposed, whole_rows);
  if (!weight) return std::nullopt;
  std::string reason = weight->obstacle();
  if (reason.empty()) reason = weight->damage();
  if (reason.empty()) return weight;
  graph.missed(kRule, node, std::move(reason));
  return std::nullopt;
}

// Makes `node` the operator of `ai.flownpu` that reads the weight.
void become(Graph& graph, Node& node, std::string_view op_type, const QuantizedWeight& weight,
            std::vector<Value> inputs) {
  node.op_type = op_type;
  node.domain = kDomain;
  node.since_version = 1;
  node.attributes = {{"M", weight.rows}, {"K", weight.columns}};
  node.inputs = std::move(inputs);
  graph.changed();
  graph.applied(kRule);
}

void matmul(Graph& graph, RepackedWeights& weights, Node& node, bool whole_rows) {
  if (node.inputs[0].type != DataType::kFloat32) return;
  const auto weight = weight_behind(graph, node, 1, true, whole_rows);
  if (weight) become(graph, node, "Q4NXMatMul", *weight, {node.inputs[0], weights.add(*weight)});
}

void gemm(Graph& graph, RepackedWeights& weights, Node& node, bool whole_rows) {
  if (node.integer("transA", 0) != 0 || node.number("alpha", 1) != 1 || node.number("beta", 1) != 1)
    return;
  const bool transposed = node.integer("transB", 0) == 0;
  const auto weight = weight_behind(graph, node, 1, transposed, whole_rows);
  if (!weight) return;
  const Value c = input_or_none(node, 2);
  Node product = node;
  become(graph, product, "Q4NXMatMul", *weight, {node.inputs[0], weights.add(*weight)});
  if (c.name.empty()) {
    node = std::move(product);
    return;
  }
  product.outputs[0].name = graph.unique_name(node.outputs[0].name + "_product");
  node.op_type = "Add";
  node.since_version = 14;
  node.attributes.clear();
  node.inputs = {product.outputs[0], c};
  graph.insert_before(node, std::move(product));
}

void gather(Graph& graph, RepackedWeights& weights, Node& node, bool whole_rows) {
  if (node.integer("axis", 0) != 0) return;
  const auto weight = weight_behind(graph, node, 0, false, whole_rows);
  if (weight) become(graph, node, "Q4NXGather", *weight, {weights.add(*weight), node.inputs[1]});
}

void take(Graph& graph, RepackedWeights& weights, bool whole_rows) {
  const auto apply = [&](std::string_view op_type, const auto& rule) {
    graph.each(op_type, "", [&](Node& node) { rule(graph, weights, node, whole_rows); });
  };
  apply("MatMul", matmul);
  apply("Gemm", gemm);
  apply("Gather", gather);
}

}  // namespace

void q4nx_dequantized(Graph& graph, RepackedWeights& weights) { take(graph, weights, false); }

void q4nx_dequantized_rows(Graph& graph, RepackedWeights& weights) { take(graph, weights, true); }

}  // namespace flownpu::lowering
