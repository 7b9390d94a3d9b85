// SPDX-License-Identifier: Apache-2.0
// GroupQueryAttention -> FlowQKVAttention, node for node: both compute
// softmax(scale * rope(Q) rope([K_past; K])^T + mask) [V_past; V] with RoPE, window, softcap and
// cache.
#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ops/lowering/lowering.h"

namespace flownpu::lowering {
namespace {

// What GroupQueryAttention has by its schemas, those of later ONNX Runtimes than 1.31.1 included,
// as far as they are known: whatever is in neither list is refused.
struct Input {
  std::string_view name;
  // Where FlowQKVAttention has the same; kNowhere if it lacks it.
  std::size_t position;
};
constexpr std::size_t kNowhere = static_cast<std::size_t>(-1);
constexpr std::size_t kPositionIds = 9;
constexpr std::size_t kSink = 11;
constexpr std::array<Input, 17> kInputs{{
    {"query", 0},
    {"key", 1},
    {"value", 2},
    {"past_key", 3},
    {"past_value", 4},
    {"seqlens_k", 5},
    {"total_sequence_length", 6},
    {"cos_cache", 7},
    {"sin_cache", 8},
    {"position_ids", kPositionIds},
    {"attention_bias", 10},
    {"head_sink", 14},
    {"k_scale", kNowhere},
    {"v_scale", kNowhere},
    {"q_norm_weight", 11},
    {"k_norm_weight", 12},
    {"query_seqlens", kNowhere},
}};
constexpr std::size_t kFlowInputs = 15;

// Those that mean the same in both.
constexpr std::array<std::string_view, 10> kSharedAttributes{
    "num_heads",       "kv_num_heads",        "scale",     "softcap",
    "causal",          "local_window_size",   "do_rotary", "rotary_interleaved",
    "qk_norm_epsilon", "sliding_window_cache"};
// Becomes a head_sink.
constexpr std::string_view kSmoothSoftmax = "smooth_softmax";
// Those that may only be there as 0, which changes nothing.
constexpr std::array<std::string_view, 2> kZeroAttributes{"qk_output", "kv_cache_bit_width"};
constexpr std::array<std::string_view, 2> kCacheTypes{"k_quant_type", "v_quant_type"};

bool lists(std::span<const std::string_view> names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

// Why the node's attributes cannot become FlowQKVAttention's; empty if they can.
std::string attribute_obstacle(const Node& node) {
  for (const auto& [name, value] : node.attributes) {
    if (lists(kCacheTypes, name)) {
      if (const std::string type = node.text(name, "NONE"); type != "NONE") {
        return name + "=" + type +
               ": FlowQKVAttention's KV cache is bf16, f16 or f32; export with one of these";
      }
    } else if (lists(kZeroAttributes, name)) {
      if (node.integer(name, 0) != 0)
        return name + "=" + std::to_string(node.integer(name, 0)) + ": FlowQKVAttention has none";
    } else if (!lists(kSharedAttributes, name) && name != kSmoothSoftmax) {
      return "attribute " + name + " is not known";
    }
  }
  return "";
}

// Why its inputs and outputs cannot; empty if they can.
std::string value_obstacle(const Node& node) {
  for (std::size_t i = 0; i < node.inputs.size(); ++i) {
    if (node.input(i) == nullptr || (i < kInputs.size() && kInputs[i].position != kNowhere))
      continue;
    const std::string name =
        i < kInputs.size() ? std::string(kInputs[i].name) : "input " + std::to_string(i);
    return name + " is given: FlowQKVAttention has no such input";
  }
  if (!node.has_output(1) || !node.has_output(2))
    return "present_key and present_value are not outputs: FlowQKVAttention appends to a KV cache";
  for (std::size_t i = 3; i < node.outputs.size(); ++i) {
    if (node.has_output(i)) {
      return (i == 3 ? "output_qk" : "output " + std::to_string(i)) +
             " is an output: FlowQKVAttention has no such output";
    }
  }
  const Value* key = node.input(1);
  if (key != nullptr && key->shape && key->shape->rank() == 3 && (*key->shape)[1] == 0)
    return "key has no tokens: FlowQKVAttention appends those of the query";
  return "";
}

// d, from the width of the query, which holds H heads, or H + 2 G where keys and values are packed
// behind it; 0 if that is not known.
std::int64_t head_size(const Node& node) {
  const Value* query = node.input(0);
  // As many as ONNX Runtime can count.
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  std::int64_t heads = std::clamp<std::int64_t>(node.integer("num_heads", 0), 0, kMost);
  if (node.input(1) == nullptr)
    heads += 2 * std::clamp<std::int64_t>(node.integer("kv_num_heads", 0), 0, kMost);
  if (query == nullptr || !query->shape || query->shape->rank() == 0 || heads <= 0) return 0;
  const std::int64_t width = (*query->shape)[-1];
  return width > 0 && width % heads == 0 ? width / heads : 0;
}

// smooth_softmax = 1 adds e^0 to the denominator: a sink of zeros, where none is given. Of other
// values ONNX Runtime makes nothing.
Value head_sink(const Node& node) {
  Value sink = input_or_none(node, kSink);
  if (!sink.name.empty() || node.integer(kSmoothSoftmax, 0) != 1) return sink;
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
  if (const std::string reason = value_obstacle(node); !reason.empty()) return reason;
  if (const std::string reason = attribute_obstacle(node); !reason.empty()) return reason;
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
    std::vector<Value> inputs(kFlowInputs);
    for (std::size_t i = 0; i < kInputs.size(); ++i) {
      if (kInputs[i].position != kNowhere) inputs[kInputs[i].position] = input_or_none(node, i);
    }
    inputs[kInputs[kSink].position] = head_sink(node);
    std::map<std::string, Attribute, std::less<>> attributes;
    for (const std::string_view name : kSharedAttributes) {
      const auto found = node.attributes.find(name);
      if (found != node.attributes.end()) attributes.insert(*found);
    }
    attributes.emplace("head_size", d);
    if (node.integer("do_rotary", 0) == 0) {
      inputs[kPositionIds] = Value{};  // They are for the rotation.
    } else if (node.input(kPositionIds) != nullptr) {
      attributes.emplace("counted_prompt", std::int64_t{1});
    }
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
