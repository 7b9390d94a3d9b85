// SPDX-License-Identifier: Apache-2.0
// GatherBlockQuantized(codes, indices, scales[, zero_points]) -> Q4NXGather(W, indices; M, K), with
// codes [M, K] of int4 or uint4, as ORT's quantiser writes them, or in bytes, [M, K/2] or [M, K],
// possibly behind a Reshape, as ORT GenAI's builder does
//
// The two differ for indices outside 0..M-1, which token ids do not have: Q4NXGather fails, while
// GatherBlockQuantized counts -M..-1 from the end and gives zeros for indices further out.
#include <string>
#include <utility>

#include "ops/lowering/lowering.h"

namespace flownpu::lowering {
namespace {

enum Input : std::uint8_t { kCodes, kIndices, kScales, kZeroPoints };

// The table; its size is taken from the scales, [M, K / block_size], or from codes [M, K]. 0 rows
// if their shape is not known.
QuantizedWeight weight_of(const Node& node, const Value& codes) {
  QuantizedWeight weight{.codes = codes,
                         .scales = input_or_none(node, kScales),
                         .zero_points = input_or_none(node, kZeroPoints),
                         .rows = 0,
                         .columns = 0,
                         .block_size = node.integer("block_size", 128),
                         .bits = node.integer("bits", 4),
                         .of_onnx_types = is_packed(codes.type)};
  if (weight.scales.shape && weight.scales.shape->rank() == 2) {
    weight.rows = (*weight.scales.shape)[0];
    weight.columns = (*weight.scales.shape)[1] * weight.block_size;
    if (is_packed(codes.type) && codes.shape && codes.shape->rank() == 2)
      weight.columns = (*codes.shape)[1];
  }
  return weight;
}

// The node's codes, or the constant behind a Reshape, which has the same bytes.
Value codes_of(Graph& graph, const Node& node) {
  const Node* reshape = graph.producer(node.inputs[kCodes].name);
  const bool through = reshape != nullptr && reshape->op_type == "Reshape" &&
                       reshape->domain.empty() && reshape->inputs[0].constant != nullptr;
  return through ? reshape->inputs[0] : node.inputs[kCodes];
}

constexpr Port kInputs[] = {
    {.name = "data",
     .types = {DataType::kUInt8, DataType::kInt4, DataType::kUInt4},
     .type_letter = 'C',
     .advice = "export with codes in bytes and float32 scales"},
    {.name = "indices", .types = kIntegers},
    {.name = "scales", .types = kFloat, .constant = true, .advice = "export with float32 inputs"},
    optional({.name = "zero_points",
              .types = {DataType::kUInt8, DataType::kInt4, DataType::kUInt4},
              .type_letter = 'C',
              .constant = true})};
constexpr Port kOutputs[] = {{.name = "output", .types = kFloat}};
constexpr AttributeRule kAttributes[] = {
    advised(either("bits", 4, 8), "Q4NX stores codes of 4 or 8 bits; export this table with these"),
    count("block_size", 1), integer("gather_axis", -3, 2), integer("quantize_axis", -3, 2)};

}  // namespace

constexpr Contract kGatherBlockQuantized{
    "com.microsoft", "GatherBlockQuantized", 1, 1, kInputs, kOutputs, kAttributes};

namespace {

// The reason why the attributes or the scales do not fit; empty if they do. The codes are not
// checked.
std::string table_obstacle(const Node& node) {
  const std::int64_t gather_axis = node.integer("gather_axis", 0);
  const std::int64_t quantize_axis = node.integer("quantize_axis", 1);
  if ((gather_axis != 0 && gather_axis != -2) || (quantize_axis != 1 && quantize_axis != -1)) {
    return "rows are gathered along axis " + std::to_string(gather_axis) +
           " and quantised along axis " + std::to_string(quantize_axis) + ", expected 0 and 1";
  }
  const QuantizedWeight weight = weight_of(node, input_or_none(node, kCodes));
  return weight.rows == 0 ? "the scales' shape is not known to be [rows, blocks of a row]" : "";
}

}  // namespace

std::string q4nx_gather_obstacle(const Node& node) {
  std::string reason = table_obstacle(node);
  const QuantizedWeight weight = weight_of(node, input_or_none(node, kCodes));
  // Codes that are no constant may come from a Reshape; q4nx_gather() checks them.
  if (!reason.empty() || weight.codes.constant == nullptr) return reason;
  reason = weight.obstacle();
  return reason.empty() ? weight.damage() : reason;
}

void q4nx_gather(Graph& graph, RepackedWeights& weights) {
  graph.each("GatherBlockQuantized", "com.microsoft", [&](Node& node) {
    if (const std::string reason = damage(kGatherBlockQuantized, node); !reason.empty())
      return graph.damaged("q4nx_gather", node, reason);
    std::string reason = obstacle(kGatherBlockQuantized, table_obstacle, node);
    if (!reason.empty()) return graph.missed("q4nx_gather", node, std::move(reason));
    const QuantizedWeight weight = weight_of(node, codes_of(graph, node));
    if (reason = weight.obstacle(); !reason.empty())
      return graph.missed("q4nx_gather", node, std::move(reason));
    if (reason = weight.damage(); !reason.empty())
      return graph.damaged("q4nx_gather", node, reason);
    node.inputs = {weights.add(weight), node.inputs[kIndices]};
    node.op_type = "Q4NXGather";
    node.domain = kDomain;
    node.since_version = 1;
    node.attributes = {{"M", weight.rows}, {"K", weight.columns}};
    graph.applied("q4nx_gather");
  });
  graph.changed();
}

}  // namespace flownpu::lowering
