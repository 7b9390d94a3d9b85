// SPDX-License-Identifier: Apache-2.0
// QMoE(X, router_probs, gate_up, scales, bias, down, scales, bias; k, activation_alpha,
//      activation_beta, swiglu_limit)
//   -> Q4NXMoE(X, , gate_up, down, router_logits, , bias, bias; swiglu_alpha, swiglu_beta,
//              swiglu_limit)
//
// The input that QMoE calls router_probs has logits: ONNX Runtime's CPU kernel takes the softmax of
// the k largest, whatever `normalize_routing_weights` says. Exporters write a Reshape of them to
// [-1, experts]; without it they have the axes of X, and can be computed token by token.
//
// Rows of gate and up alternate (`swiglu_fusion` 1), or all rows of the gate come first (2), those
// of the weight and of its bias. Biases of 0, which exporters write for models that have none, are
// left out.
//
// With `quant_type` fp4 (MXFP4) the codes are [experts, columns, rows] of e2m1, in blocks of 32
// columns with scales of float8e8m0, and each expert has one more scale. Q4NX holds the products
// exactly where the latter are powers of two (exporters write 1); else their scales round to bf16.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ops/lowering/lowering.h"

namespace flownpu::lowering {
namespace {

enum Input : std::uint8_t {
  kX,
  kLogits,
  kGateUp,
  kGateUpScales,
  kGateUpBias,
  kDown,
  kDownScales,
  kDownBias,
  kUp,
  kUpScales,
  kUpBias,
  kGateUpZeroPoints,
  kDownZeroPoints,
  kUpZeroPoints,
  kRouterWeights,
  kGateUpFactors,
  kDownFactors
};
constexpr std::int64_t kInTurns = 1;
constexpr std::int64_t kAbove = 2;

constexpr std::string_view kOneInput = "gate and up must be one input; export with swiglu_fusion=1";
constexpr Types kScaleTypes{DataType::kFloat32, DataType::kFloat8E8M0};
constexpr Port kInputs[] = {
    {.name = "input",
     .types = kFloat,
     .shape = "[..,D]",
     .advice = "export with float32 inputs and outputs"},
    {.name = "router_probs", .types = kFloat, .shape = "[..,E]"},
    {.name = "fc1_experts_weights", .types = kUInt8, .shape = "[E,?,?]", .constant = true},
    optional({.name = "fc1_scales", .types = kScaleTypes, .constant = true}),
    optional({.name = "fc1_experts_bias", .types = kFloat, .constant = true}),
    {.name = "fc2_experts_weights", .types = kUInt8, .shape = "[E,?,?]", .constant = true},
    optional({.name = "fc2_scales", .types = kScaleTypes, .constant = true}),
    optional({.name = "fc2_experts_bias", .types = kFloat, .constant = true}),
    optional({.name = "fc3_experts_weights", .types = kNone, .advice = kOneInput}),
    optional({.name = "fc3_scales", .types = kNone, .advice = kOneInput}),
    optional({.name = "fc3_experts_bias", .types = kNone, .advice = kOneInput}),
    optional({.name = "fc1_zero_points", .types = kUInt8, .constant = true}),
    optional({.name = "fc2_zero_points", .types = kUInt8, .constant = true}),
    optional({.name = "fc3_zero_points", .types = kNone, .advice = kOneInput}),
    optional({.name = "router_weights",
              .types = kNone,
              .advice = "experts are weighed by what they are chosen by"}),
    optional({.name = "fc1_global_scale", .types = kFloat, .shape = "[E]", .constant = true}),
    optional({.name = "fc2_global_scale", .types = kFloat, .shape = "[E]", .constant = true})};
constexpr Port kOutputs[] = {{.name = "output", .types = kFloat, .shape = "[..,D]"}};

constexpr std::string_view kBits = "Q4NX stores codes of 4 or 8 bits; export experts with these";
constexpr std::string_view kLimit = "gates have a positive limit, or none";
constexpr AttributeRule kAttributes[] = {
    required(count("k", 1)),
    advised(required(text("activation_type", "swiglu")), "gates are those of SwiGLU"),
    advised(required(integer("swiglu_fusion", kInTurns, kAbove)), kOneInput),
    number("activation_alpha"),
    number("activation_beta"),
    advised(number("swiglu_limit", std::numeric_limits<float>::min()), kLimit),
    advised(either("expert_weight_bits", 4, 8), kBits),
    advised(either("fc1_expert_weight_bits", 4, 8), kBits),
    advised(either("fc2_expert_weight_bits", 4, 8), kBits),
    advised(either("fc3_expert_weight_bits", 4, 8), kBits),
    advised(text("quant_type", "int|fp4"), kBits),
    count("block_size", 1),
    flag("normalize_routing_weights"),
    advised(only("use_sparse_mixer", 0), "experts are chosen by their logits, all at once"),
    advised(integer("weights_prepacked", -1, 0),
            "the codes are in an order made for a GPU; export without it"),
    integer("accuracy_level", 0, 4)};

}  // namespace

constexpr Contract kQMoE{"com.microsoft", "QMoE", 1, 1, kInputs, kOutputs, kAttributes};

namespace {

// The values of e2m1 are multiples of a half.
constexpr ValueTable kE2m1{{0, 0.5F, 1, 1.5F, 2, 3, 4, 6, 0, -0.5F, -1, -1.5F, -2, -3, -4, -6}, 2};

bool is_fp4(const Node& node) { return node.text("quant_type", "int") == "fp4"; }

// The weights of all experts as one weight, from codes [E, rows, bytes of a row], or of fp4 [E,
// columns, bytes of a column]. Without a block_size a row has one scale.
QuantizedWeight weight_of(const Node& node, Input codes, Input scales, Input zero_points,
                          Input factors, std::string_view bits) {
  QuantizedWeight weight{.codes = input_or_none(node, codes),
                         .scales = input_or_none(node, scales),
                         .zero_points = input_or_none(node, zero_points),
                         .bits = node.integer(bits, node.integer("expert_weight_bits", 4))};
  if (!weight.codes.shape || weight.codes.shape->rank() != 3) return weight;
  const Shape shape = *weight.codes.shape;
  if (is_fp4(node)) {
    weight.codes.type = DataType::kUInt4;
    weight.codes.shape = Shape{shape[0], shape[1], 2 * shape[2]};
    weight.of_onnx_types = weight.transposed = true;
    weight.factors = input_or_none(node, factors);
    weight.table = &kE2m1;
    weight.rows = shape[0] * 2 * shape[2];
    weight.columns = shape[1];
    weight.block_size = q4nx::kGroup;  // MXFP4's
    return weight;
  }
  weight.rows = shape[0] * shape[1];
  weight.columns = shape[2] * 8 / weight.bits;
  weight.block_size = node.integer("block_size", weight.columns);
  return weight;
}

QuantizedWeight gate_up_of(const Node& node) {
  return weight_of(node, kGateUp, kGateUpScales, kGateUpZeroPoints, kGateUpFactors,
                   "fc1_expert_weight_bits");
}

QuantizedWeight down_of(const Node& node) {
  return weight_of(node, kDown, kDownScales, kDownZeroPoints, kDownFactors,
                   "fc2_expert_weight_bits");
}

std::int64_t experts_of(const QuantizedWeight& weight) {
  return weight.codes.shape ? (*weight.codes.shape)[0] : 0;
}

// Why a bias does not have a number for each row of all experts; empty if it does, or is absent.
std::string bias_obstacle(const Value* bias, std::int64_t experts, std::int64_t rows) {
  if (bias == nullptr || bias->shape == Shape{experts, rows / experts}) return "";
  return bias->name + " is not of " + std::to_string(experts) + " x " +
         std::to_string(rows / experts);
}

// The bias [experts, rows], of which those of the gate come first; without a name if it is 0.
Value sorted_bias(Graph& graph, const Value* bias, std::int64_t experts, bool in_turns) {
  if (bias == nullptr) return {};
  const auto* values = static_cast<const float*>(bias->constant);
  const auto elements = static_cast<std::int64_t>(bias->bytes() / sizeof(float));
  if (std::all_of(values, values + elements, [](float b) { return b == 0; })) return {};
  if (!in_turns) return *bias;
  const std::int64_t half = elements / experts / 2;
  auto sorted = std::make_shared<std::vector<float>>(static_cast<std::size_t>(elements));
  for (std::int64_t i = 0; i < elements; ++i) {
    // Row i of an expert has rows 2 i (gate) or 2 (i - half) + 1 (up).
    const std::int64_t row = i % (2 * half);
    const std::int64_t from = row < half ? 2 * row : 2 * (row - half) + 1;
    (*sorted)[static_cast<std::size_t>(i)] = values[i - row + from];
  }
  Value value = *bias;
  value.name = graph.unique_name(bias->name + "_sorted");
  value.constant = sorted->data();
  value.owner = std::move(sorted);
  return value;
}

// Why a weight's inputs are not those of its `quant_type`; empty if they are.
std::string type_obstacle(const QuantizedWeight& weight, bool fp4) {
  const bool has_points = !weight.zero_points.name.empty();
  if (fp4 && (weight.bits != 4 || has_points || weight.factors.name.empty()))
    return weight.codes.name + ": quant_type fp4 has 4 bits, a global scale and no zero points";
  const bool fits = (weight.scales.type == DataType::kFloat8E8M0) == fp4;
  return fits ? ""
              : weight.scales.name + " is of " + std::string(name_of(weight.scales.type)) +
                    ", expected " + (fp4 ? "float8e8m0 for fp4" : "float");
}

// Why the node's weights and biases do not fit Q4NXMoE; empty if they do.
std::string weight_obstacle(const Node& node) {
  const QuantizedWeight gate_up = gate_up_of(node);
  const QuantizedWeight down = down_of(node);
  for (const QuantizedWeight* weight : {&gate_up, &down}) {
    if (weight->scales.name.empty()) return weight->codes.name + " has no scales";
    if (std::string reason = type_obstacle(*weight, is_fp4(node)); !reason.empty()) return reason;
    if (std::string reason = weight->obstacle(); !reason.empty()) return reason;
  }
  const std::int64_t experts = experts_of(gate_up);
  if (gate_up.rows != 2 * experts * down.columns || down.rows != experts * gate_up.columns) {
    return "experts of " + std::to_string(gate_up.rows / experts) + " x " +
           std::to_string(gate_up.columns) + " and " + std::to_string(down.rows / experts) + " x " +
           std::to_string(down.columns) + ", expected 2 I x D and D x I";
  }
  std::string reason = bias_obstacle(node.input(kGateUpBias), experts, gate_up.rows);
  return reason.empty() ? bias_obstacle(node.input(kDownBias), experts, down.rows) : reason;
}

// The logits, those before a Reshape to [-1, experts] if there is one.
Value logits_of(Graph& graph, const Node& node, std::int64_t experts) {
  const Value& given = node.inputs[kLogits];
  const Node* reshape = graph.producer(given.name, "Reshape", "");
  const std::vector<std::int64_t> flat{-1, experts};
  const bool is_flat = reshape != nullptr && constant_integers(reshape->input(1)) == flat;
  return is_flat ? reshape->inputs[0] : given;
}

// Makes the node, which fits, a Q4NXMoE.
void put_mixture(Graph& graph, RepackedWeights& weights, Node& node) {
  const QuantizedWeight gate_up = gate_up_of(node);
  const QuantizedWeight down = down_of(node);
  const std::int64_t experts = experts_of(gate_up);
  std::vector<QuantizedWeight> inner;
  std::vector<QuantizedWeight> outer;
  const bool in_turns = node.required_integer("swiglu_fusion") == kInTurns;
  for (std::int64_t expert = 0; expert < experts; ++expert) {
    const std::int64_t first = expert * 2 * down.columns;
    for (const std::int64_t half : {0, 1}) {
      inner.push_back(in_turns ? gate_up.some_rows(first + half, 2, down.columns)
                               : gate_up.some_rows(first + half * down.columns, 1, down.columns));
    }
    outer.push_back(down.some_rows(expert * gate_up.columns, 1, gate_up.columns));
  }
  const std::int64_t taken = node.required_integer("k");
  const float limit = node.number("swiglu_limit", std::numeric_limits<float>::infinity());
  const float alpha = node.number("activation_alpha", 1);
  const float beta = node.number("activation_beta", 0);
  const Value gate_up_bias = sorted_bias(graph, node.input(kGateUpBias), experts, in_turns);
  const Value down_bias = sorted_bias(graph, node.input(kDownBias), experts, false);
  node.inputs = {node.inputs[kX],
                 Value{},
                 weights.stack(inner, gate_up.codes.name),
                 weights.stack(outer, down.codes.name),
                 logits_of(graph, node, experts),
                 Value{},
                 gate_up_bias,
                 down_bias};
  while (node.inputs.back().name.empty()) node.inputs.pop_back();
  node.op_type = "Q4NXMoE";
  node.domain = kDomain;
  node.since_version = 1;
  node.attributes = {{"num_experts", experts},
                     {"experts_per_token", taken},
                     {"hidden_size", gate_up.columns},
                     {"expert_size", down.columns},
                     {"swiglu_alpha", alpha},
                     {"swiglu_beta", beta},
                     {"swiglu_limit", std::isfinite(limit) ? limit : 0.0F}};
}

}  // namespace

std::string q4nx_moe_obstacle(const Node& node) {
  std::string reason = weight_obstacle(node);
  for (const QuantizedWeight& weight : {gate_up_of(node), down_of(node)})
    if (reason.empty()) reason = weight.damage();
  return reason;
}

void q4nx_moe(Graph& graph, RepackedWeights& weights) {
  graph.each("QMoE", "com.microsoft", [&](Node& node) {
    if (const std::string reason = damage(kQMoE, node); !reason.empty())
      return graph.damaged("q4nx_moe", node, reason);
    if (std::string reason = obstacle(kQMoE, weight_obstacle, node); !reason.empty())
      return graph.missed("q4nx_moe", node, std::move(reason));
    const QuantizedWeight gate_up = gate_up_of(node);
    const QuantizedWeight down = down_of(node);
    for (const QuantizedWeight* weight : {&gate_up, &down}) {
      if (const std::string reason = weight->damage(); !reason.empty())
        return graph.damaged("q4nx_moe", node, reason);
    }
    put_mixture(graph, weights, node);
    graph.applied("q4nx_moe");
  });
  graph.changed();
}

}  // namespace flownpu::lowering
