// SPDX-License-Identifier: Apache-2.0
// GroupQueryAttention -> FlowQKVAttention, node for node: both compute
// softmax(scale * rope(Q) rope([K_past; K])^T + mask) [V_past; V] with RoPE, window, softcap and
// cache.
#include "ops/nodes/flow_qkv_attention.h"

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ops/lowering/lowering.h"

namespace flownpu::lowering {
namespace {

// The head size d, computed from the width of the query; 0 if it is not known. The query holds H
// heads, or H + 2 G heads if packed keys and values follow.
std::int64_t head_size(const Node& node) {
  const Value* query = node.input(kQuery);
  // The most heads that ONNX Runtime can count.
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  std::int64_t heads = std::clamp<std::int64_t>(node.integer("num_heads", 0), 0, kMost);
  if (node.input(kKey) == nullptr)
    heads += 2 * std::clamp<std::int64_t>(node.integer("kv_num_heads", 0), 0, kMost);
  if (query == nullptr || !query->shape || query->shape->rank() == 0 || heads <= 0) return 0;
  const std::int64_t width = (*query->shape)[-1];
  return width > 0 && width % heads == 0 ? width / heads : 0;
}

constexpr auto kOptional = Presence::kOptional;
constexpr std::string_view kUnquantized =
    "FlowQKVAttention's KV cache is bf16, f16 or f32; export with one of these";
constexpr std::string_view kAppends = "FlowQKVAttention appends to a KV cache";
constexpr Port kInputs[] = {
    {.name = "query",
     .types = kFloat,
     .shape = "[B,S,?]",
     .advice = "export with float32 activations"},
    {.name = "key", .types = kFloat, .presence = kOptional, .shape = "[B,S,K]"},
    {.name = "value", .types = kFloat, .presence = kOptional, .shape = "[B,S,K]"},
    {.name = "past_key", .types = kFloats, .presence = kOptional, .shape = "[B,G,P,D]"},
    {.name = "past_value", .types = kFloats, .presence = kOptional, .shape = "[B,G,P,D]"},
    {.name = "seqlens_k", .types = kInt32},
    {.name = "total_sequence_length", .types = kInt32},
    {.name = "cos_cache", .types = kFloat, .presence = kOptional, .shape = "[R,A]"},
    {.name = "sin_cache", .types = kFloat, .presence = kOptional, .shape = "[R,A]"},
    {.name = "position_ids", .types = kInt64, .presence = kOptional},
    {.name = "attention_bias", .types = kFloat, .presence = kOptional, .shape = "[?,?,?,?]"},
    {.name = "head_sink", .types = kFloat, .presence = kOptional, .shape = "[H]"},
    {.name = "k_scale", .types = kNone, .presence = kOptional, .advice = kUnquantized},
    {.name = "v_scale", .types = kNone, .presence = kOptional, .advice = kUnquantized},
    {.name = "q_norm_weight", .types = kFloat, .presence = kOptional},
    {.name = "k_norm_weight", .types = kFloat, .presence = kOptional}};
constexpr Port kOutputs[] = {{.name = "output", .types = kFloat},
                             {.name = "present_key", .types = kFloats, .advice = kAppends},
                             {.name = "present_value", .types = kFloats, .advice = kAppends},
                             {.name = "output_qk", .types = kNone, .presence = kOptional}};
constexpr AttributeRule kAttributes[] = {attention::kNumHeads,
                                         attention::kKvNumHeads,
                                         attention::kScale,
                                         attention::kSoftcap,
                                         flag("causal"),
                                         attention::kLocalWindowSize,
                                         attention::kDoRotary,
                                         attention::kRotaryInterleaved,
                                         attention::kQkNormEpsilon,
                                         flag("sliding_window_cache"),
                                         integer("smooth_softmax", -1, 1),
                                         only("qk_output", 0),
                                         advised(only("kv_cache_bit_width", 0), kUnquantized),
                                         advised(text("k_quant_type", "NONE"), kUnquantized),
                                         advised(text("v_quant_type", "NONE"), kUnquantized)};

// smooth_softmax = 1 adds e^0 to the denominator, as a sink of zeros does. A given head_sink
// replaces it. ONNX Runtime ignores other values.
Value head_sink(Graph& graph, const Node& node) {
  Value sink = input_or_none(node, position(kInputs, "head_sink"));
  if (!sink.name.empty() || node.integer("smooth_softmax", 0) != 1) return sink;
  const std::int64_t heads = node.required_integer("num_heads");
  auto zeros = std::make_shared<float[]>(static_cast<std::size_t>(heads));
  sink.name = graph.unique_name(node.outputs[0].name + ".head_sink");
  sink.type = DataType::kFloat32;
  sink.shape = Shape{heads};
  sink.constant = zeros.get();
  sink.owner = std::move(zeros);
  return sink;
}

}  // namespace

constexpr Contract kGroupQueryAttention{
    "com.microsoft", "GroupQueryAttention", 1, 1, kInputs, kOutputs, kAttributes};

std::string flow_qkv_attention_obstacle(const Node& node) {
  const Value* key = node.input(kKey);
  if (key != nullptr && key->shape && key->shape->rank() == 3 && (*key->shape)[1] == 0)
    return "key has no tokens; FlowQKVAttention appends those of the query to the KV cache";
  if (head_size(node) == 0) return "the head size is not known from the query's last axis";
  return "";
}

void flow_qkv_attention(Graph& graph) {
  graph.each("GroupQueryAttention", "com.microsoft", [&](Node& node) {
    if (const std::string broken = damage(kGroupQueryAttention, node); !broken.empty())
      return graph.damaged("flow_qkv_attention", node, broken);
    std::string reason = obstacle(kGroupQueryAttention, flow_qkv_attention_obstacle, node);
    if (!reason.empty()) return graph.missed("flow_qkv_attention", node, std::move(reason));
    const std::int64_t d = head_size(node);
    // Inputs and attributes of the same names mean the same in both.
    std::vector<Value> inputs(std::size(kAttentionPorts));
    for (std::size_t i = 0; i < std::size(kInputs); ++i) {
      const auto* port = std::ranges::find(kAttentionPorts, kInputs[i].name, &Port::name);
      if (port != std::end(kAttentionPorts)) {
        const auto place = static_cast<std::size_t>(port - std::begin(kAttentionPorts));
        inputs[place] = input_or_none(node, i);
      }
    }
    inputs[kHeadSink] = head_sink(graph, node);
    std::map<std::string, Attribute, std::less<>> attributes;
    for (const AttributeRule& rule : kAttentionAttributes) {
      const auto found = node.attributes.find(rule.name);
      if (found != node.attributes.end()) attributes.insert(*found);
    }
    attributes.emplace("head_size", d);
    if (node.integer("do_rotary", 0) == 0) {
      inputs[kPositionIds] = Value{};  // position_ids are only used for the rotation.
    } else if (node.input(kPositionIds) != nullptr) {
      attributes.emplace("counted_prompt", std::int64_t{1});
    }
    node.op_type = "FlowQKVAttention";
    node.domain = kDomain;
    node.since_version = 1;
    node.attributes = std::move(attributes);
    node.inputs = std::move(inputs);
    node.outputs.resize(3);
    graph.applied("flow_qkv_attention");
  });
  graph.changed();
}

}  // namespace flownpu::lowering
