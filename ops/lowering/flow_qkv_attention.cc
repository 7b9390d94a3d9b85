// SPDX-License-Identifier: Apache-2.0
// GroupQueryAttention -> FlowQKVAttention, node for node: both compute
// softmax(scale * rope(Q) rope([K_past; K])^T + mask) [V_past; V] with RoPE, window, softcap and
// cache.
#include <array>
#include <memory>
#include <string>
#include <string_view>

#include "ops/lowering/lowering.h"

namespace flownpu::lowering {
namespace {

// Inputs 0..10 are the same in both; GroupQueryAttention then has head_sink, two that
// FlowQKVAttention lacks, and the weights of the norms of query and key.
constexpr std::size_t kSharedInputs = 11;
constexpr std::size_t kSink = 11;
struct RefusedInput {
  std::size_t position;
  std::string_view name;
};
constexpr std::array<RefusedInput, 2> kRefused{{{12, "k_scale"}, {13, "v_scale"}}};
constexpr std::array<std::size_t, 2> kNormWeights{14, 15};

// Those that mean the same in both.
constexpr std::array<std::string_view, 10> kSharedAttributes{
    "num_heads",       "kv_num_heads",        "scale",     "softcap",
    "causal",          "local_window_size",   "do_rotary", "rotary_interleaved",
    "qk_norm_epsilon", "sliding_window_cache"};

// d, from the width of the query, which holds H heads, or H + 2 G where keys and values are packed
// behind it; 0 if that is not known.
std::int64_t head_size(const Node& node) {
  const Value* query = node.input(0);
  std::int64_t heads = node.integer("num_heads", 0);
  if (node.input(1) == nullptr) heads += 2 * node.integer("kv_num_heads", 0);
  if (query == nullptr || !query->shape || query->shape->rank() == 0 || heads <= 0) return 0;
  const std::int64_t width = (*query->shape)[-1];
  return width > 0 && width % heads == 0 ? width / heads : 0;
}

// smooth_softmax = 1 adds e^0 to the denominator: a sink of zeros, where none is given.
Value head_sink(const Node& node) {
  Value sink = input_or_none(node, kSink);
  if (!sink.name.empty() || node.integer("smooth_softmax", 0) <= 0) return sink;
  const std::int64_t heads = node.required_integer("num_heads");
  auto zeros = std::make_shared<float[]>(static_cast<std::size_t>(heads));
  sink.name = node.outputs[0].name + ".head_sink";
  sink.type = DataType::kFloat32;
  sink.shape = Shape{heads};
  sink.constant = zeros.get();
  sink.owner = std::move(zeros);
  return sink;
}

}  // namespace

std::string flow_qkv_attention_obstacle(const Node& node) {
  for (const RefusedInput& refused : kRefused) {
    if (node.input(refused.position) != nullptr)
      return std::string(refused.name) + " is given: FlowQKVAttention has no such input";
  }
  for (const std::string_view name : {"k_quant_type", "v_quant_type"}) {
    if (const std::string type = node.text(name, "NONE"); type != "NONE") {
      return std::string(name) + "=" + type +
             ": FlowQKVAttention's KV cache is bf16, f16 or f32; export with one of these";
    }
  }
  if (!node.has_output(1) || !node.has_output(2))
    return "present_key and present_value are not outputs: FlowQKVAttention appends to a KV cache";
  const Value* query = node.input(0);
  if (query == nullptr || query->type != DataType::kFloat32)
    return "the query is not float; export with float32 activations";
  if (head_size(node) == 0) return "the head size is not known from the query's last axis";
  return "";
}

void flow_qkv_attention(Graph& graph) {
  graph.each("GroupQueryAttention", "com.microsoft", [&](Node& node) {
    if (!flow_qkv_attention_obstacle(node).empty()) return;
    const std::int64_t d = head_size(node);
    std::vector<Value> inputs;
    inputs.reserve(kSharedInputs + kNormWeights.size() + 2);
    for (std::size_t i = 0; i < kSharedInputs; ++i) inputs.push_back(input_or_none(node, i));
    for (const std::size_t i : kNormWeights) inputs.push_back(input_or_none(node, i));
    inputs.emplace_back();  // bidirectional_blocks
    inputs.push_back(head_sink(node));
    std::map<std::string, Attribute, std::less<>> attributes;
    for (const std::string_view name : kSharedAttributes) {
      const auto found = node.attributes.find(name);
      if (found != node.attributes.end()) attributes.insert(*found);
    }
    attributes.emplace("head_size", d);
    node.op_type = "FlowQKVAttention";
    node.domain = kDomain;
    node.since_version = 1;
    node.attributes = std::move(attributes);
    node.inputs = std::move(inputs);
    node.outputs.resize(3);
  });
  graph.changed();
}

}  // namespace flownpu::lowering
