// SPDX-License-Identifier: Apache-2.0
// MatMulNBits(X, codes, scales[, zero_points][, g_idx][, bias]; K, N) -> Q4NXMatMul(X, W[, bias]; M
// = N, K)
// MatMulBnb4(X, codes, scales; K, N) -> Q4NXMatMul(X, W; M = N, K), whose W has a table of values
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

// The values of the types of bitsandbytes: FP4, with a bias of 3 and 1 as its largest value, and
// NF4, quantiles of the normal distribution (QLoRA, arXiv 2305.14314, appendix E).
constexpr float kSteps = 127;  // int8's largest value stands for 1, theirs
constexpr ValueTable kFp4{{0, 1.0F / 192, 2.0F / 3, 1, 1.0F / 3, 0.5F, 1.0F / 6, 0.25F, 0,
                           -1.0F / 192, -2.0F / 3, -1, -1.0F / 3, -0.5F, -1.0F / 6, -0.25F},
                          kSteps};
constexpr ValueTable kNf4{
    {-1.0F, -0.696192801F, -0.525073051F, -0.394917488F, -0.284441382F, -0.184773430F,
     -0.0910500363F, 0.0F, 0.0795802996F, 0.160930201F, 0.246112302F, 0.337915242F, 0.440709829F,
     0.562617004F, 0.722956836F, 1.0F},
    kSteps};

QuantizedWeight weight_of_bnb4(const Node& node) {
  return {.codes = input_or_none(node, kCodes),
          .scales = input_or_none(node, kScales),
          .zero_points = {},
          .rows = node.required_integer("N"),
          .columns = node.required_integer("K"),
          .block_size = node.required_integer("block_size"),
          .table = node.required_integer("quant_type") == 0 ? &kFp4 : &kNf4};
}

std::string obstacle_of_bnb4(const Node& node) {
  const QuantizedWeight weight = weight_of_bnb4(node);
  if (weight.block_size > 0 && weight.columns % weight.block_size != 0)
    return "K=" + std::to_string(weight.columns) +
           " is no multiple of block_size=" + std::to_string(weight.block_size) +
           ", so that rows share scales";
  return weight.obstacle();
}

constexpr Port kBnb4Inputs[] = {
    kInputs[kX], kInputs[kCodes], {.name = "absmax", .types = kFloat, .constant = true}};
constexpr AttributeRule kBnb4Attributes[] = {
    required(count("K", 1)),
    required(count("N", 1)),
    required(count("block_size", 1)),
    required(integer("quant_type", 0, 1)),
    advised(only("training_mode", 0), "it is for training"),
    advised(only("transB", 1), "the codes are then not those of rows of W")};

}  // namespace

constexpr Contract kMatMulNBits{"com.microsoft", "MatMulNBits", 1,          1,
                                kInputs,         kOutputs,      kAttributes};
constexpr Contract kMatMulBnb4{"com.microsoft", "MatMulBnb4",   1, 1, kBnb4Inputs,
                               kOutputs,        kBnb4Attributes};

std::string q4nx_matmul_obstacle(const Node& node) {
  const QuantizedWeight weight = weight_of(node);
  const std::string reason = weight.obstacle();
  return reason.empty() ? weight.damage() : reason;
}

std::string q4nx_matmul_bnb4_obstacle(const Node& node) {
  const std::string reason = obstacle_of_bnb4(node);
  return reason.empty() ? weight_of_bnb4(node).damage() : reason;
}

namespace {

void lower(Graph& graph, RepackedWeights& weights, const Contract& contract,
           QuantizedWeight (*read)(const Node& node), std::string (*weight_obstacle)(const Node&)) {
  graph.each(contract.op_type, contract.domain, [&](Node& node) {
    if (const std::string reason = damage(contract, node); !reason.empty())
      return graph.damaged("q4nx_matmul", node, reason);
    if (std::string reason = obstacle(contract, weight_obstacle, node); !reason.empty())
      return graph.missed("q4nx_matmul", node, std::move(reason));
    const QuantizedWeight weight = read(node);
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

}  // namespace

void q4nx_matmul(Graph& graph, RepackedWeights& weights) {
  lower(graph, weights, kMatMulNBits, weight_of,
        [](const Node& node) { return weight_of(node).obstacle(); });
}

void q4nx_matmul_bnb4(Graph& graph, RepackedWeights& weights) {
  lower(graph, weights, kMatMulBnb4, weight_of_bnb4, obstacle_of_bnb4);
}

}  // namespace flownpu::lowering
