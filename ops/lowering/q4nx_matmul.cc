// SPDX-License-Identifier: Apache-2.0
// MatMulNBits(X, codes, scales[, zero_points][, g_idx][, bias]; K, N) -> Q4NXMatMul(X, W[, bias]; M
// = N, K)
//
// `accuracy_level` has no counterpart: how activations are rounded is an option of the provider.
#include <string>
#include <utility>

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
          .block_size = node.required_integer("block_size"),
          .bits = node.integer("bits", 4)};
}

constexpr Port kInputs[] = {
    {.name = "A",
     .types = kFloat,
     .shape = "[..,K]",
     .advice = "export with float32 inputs and outputs"},
    {.name = "B", .types = {DataType::kUInt8}, .constant = true},
    {.name = "scales", .types = kFloat, .constant = true},
    optional(
        {.name = "zero_points", .types = {DataType::kUInt8, DataType::kFloat32}, .constant = true}),
    optional(
        {.name = "g_idx",
         .types = kNone,
         .advice = "Q4NX groups are 32 columns in order; export without reordering (act-order)"}),
    optional({.name = "bias", .types = kFloat, .shape = "[N]"})};
constexpr Port kOutputs[] = {{.name = "Y", .types = kFloat, .shape = "[..,N]"}};
// `accuracy_level` is ignored: see above.
constexpr AttributeRule kAttributes[] = {
    required(count("K", 1)),
    required(count("N", 1)),
    required(count("block_size", 1)),
    advised(either("bits", 4, 8),
            "Q4NX stores codes of 4 or 8 bits; export this weight with these"),
    integer("accuracy_level", 0, 4),
    advised(only("weight_prepacked", 0),
            "the codes are in an order made for a GPU; export without it")};

}  // namespace

constexpr Contract kMatMulNBits{"com.microsoft", "MatMulNBits", 1,          1,
                                kInputs,         kOutputs,      kAttributes};

std::string q4nx_matmul_obstacle(const Node& node) {
  const QuantizedWeight weight = weight_of(node);
  const std::string reason = weight.obstacle();
  return reason.empty() ? weight.damage() : reason;
}

void q4nx_matmul(Graph& graph, RepackedWeights& weights) {
  graph.each("MatMulNBits", "com.microsoft", [&](Node& node) {
    if (const std::string reason = damage(kMatMulNBits, node); !reason.empty())
      return graph.damaged("q4nx_matmul", node, reason);
    const auto weight_obstacle = [](const Node& of) { return weight_of(of).obstacle(); };
    if (std::string reason = obstacle(kMatMulNBits, weight_obstacle, node); !reason.empty())
      return graph.missed("q4nx_matmul", node, std::move(reason));
    const QuantizedWeight weight = weight_of(node);
    if (const std::string reason = weight.damage(); !reason.empty())
      return graph.damaged("q4nx_matmul", node, reason);
    std::vector<Value> inputs{node.inputs[kX], weights.add(weight)};
    if (const Value* bias = node.input(kBias)) inputs.push_back(*bias);
    node.op_type = "Q4NXMatMul";
    node.domain = kDomain;
    node.since_version = 1;
    node.attributes = {{"M", weight.rows}, {"K", weight.columns}};
    node.inputs = std::move(inputs);
    graph.applied("q4nx_matmul");
  });
  graph.changed();
}

}  // namespace flownpu::lowering
