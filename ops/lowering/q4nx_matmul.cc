// SPDX-License-Identifier: Apache-2.0
// MatMulNBits(X, codes, scales[, zero_points][, g_idx][, bias]; K, N) -> Q4NXMatMul(X, W[, bias]; M
// = N, K)
//
// `accuracy_level` has no counterpart: how activations are held is an option of the provider.
#include <string>

#include "ops/lowering/lowering.h"

namespace flownpu::lowering {
namespace {

enum Input : std::uint8_t { kX, kCodes, kScales, kZeroPoints, kGroupIndex, kBias };

QuantizedWeight weight_of(const Node& node) {
  return {.codes = input_or_none(node, kCodes),
          .scales = input_or_none(node, kScales),
          .zero_points = input_or_none(node, kZeroPoints),
          .rows = node.required_integer("N"),
          .columns = node.required_integer("K"),
          .block_size = node.required_integer("block_size")};
}

}  // namespace

std::string q4nx_matmul_obstacle(const Node& node) {
  if (const std::int64_t bits = node.integer("bits", 4); bits != 4) {
    return "bits=" + std::to_string(bits) +
           ": Q4NX stores 4-bit codes; export this weight with 4 bits";
  }
  if (node.integer("weight_prepacked", 0) != 0)
    return "weight_prepacked: the codes are in an order made for a GPU; export without it";
  if (node.input(kGroupIndex) != nullptr) {
    return "g_idx: Q4NX groups are 32 columns in order; export without reordering (act-order)";
  }
  const Value* x = node.input(kX);
  if (x == nullptr || x->type != DataType::kFloat32)
    return "activations are not float; export with float32 inputs and outputs";
  return weight_of(node).obstacle();
}

void q4nx_matmul(Graph& graph, RepackedWeights& weights) {
  graph.each("MatMulNBits", "com.microsoft", [&](Node& node) {
    if (!q4nx_matmul_obstacle(node).empty()) return;
    const QuantizedWeight weight = weight_of(node);
    std::vector<Value> inputs{node.inputs[kX], weights.add(weight)};
    if (const Value* bias = node.input(kBias)) inputs.push_back(*bias);
    node.op_type = "Q4NXMatMul";
    node.domain = kDomain;
    node.since_version = 1;
    node.attributes = {{"M", weight.rows}, {"K", weight.columns}};
    node.inputs = std::move(inputs);
  });
  graph.changed();
}

}  // namespace flownpu::lowering
