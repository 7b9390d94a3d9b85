// SPDX-License-Identifier: Apache-2.0
// A layer's attention: its heads, norms of queries and keys, rotary tables, masks and caches.
#include <algorithm>
#include <cmath>
#include <utility>

#include "ops/error.h"
#include "ops/transformer/graph/operators.h"
#include "ops/transformer/matcher.h"

namespace flownpu::transformer {
std::int64_t Matcher::table_of(const Node& attention) {
  RotaryValues found;
  if (attention.integer("do_rotary", 0) != 0) {
    found = {attention.input(kCosCache), attention.input(kSinCache)};
    for (const Value* table : {found.cosine, found.sine}) check_table(attention, table);
  }
  const auto known = std::ranges::find(tables, found);
  const auto index = known - tables.begin();
  if (known == tables.end()) {
    tables.push_back(found);
    constants.rotary.push_back(found.constants());
  }
  return index;
}

// Throws Error unless this cos_cache or sin_cache is a constant of the size that others have, or,
// as others, a value that the graph computes, whose size a run checks. The columns tell how much of
// a head turns.
void Matcher::check_table(const Node& attention, const Value* table) {
  const std::int64_t half = attention.required_integer("head_size") / 2;
  const bool given = limits_.given_tables && table != nullptr && table->constant == nullptr;
  const auto [rows, columns] = given ? size_of_given_table(*table, half) : size_of_table(table);
  const bool partial = 0 < columns && columns < half;
  const bool fits = rows > 0 && (partial ? limits_.partial_rotation : columns == half);
  const std::int64_t rotated = partial ? 2 * columns : 0;
  if (fits && decoder.positions == 0) {
    decoder.positions = rows;
    decoder.rotated_size = rotated;
    decoder.given_tables = given;
  }
  if (fits && rows == decoder.positions && rotated == decoder.rotated_size) return;
  fail(to_string(attention), ": expected cos_cache and sin_cache to be initializers, float [",
       decoder.positions == 0 ? "positions" : std::to_string(decoder.positions), ", ",
       decoder.rotated_size == 0 ? half : decoder.rotated_size / 2, "]",
       partial && !fits ? ", got [.., " + std::to_string(columns) +
                              "]: a part of each head turns; convert the checkpoint itself, whose "
                              "heads are put in an order in which all of it does"
       : table != nullptr && table->constant == nullptr
           ? ", got values that the graph computes, as it does LongRoPE's: convert the checkpoint "
             "itself with a --context-length of the first table"
           : "");
}

// 1 + the index of an attention's mask among those of all layers; 0: it has none.
std::int64_t Matcher::mask_of(const Node& attention) {
  const Value* mask = attention.input(kAttentionBias);
  if (mask == nullptr) return 0;
  const auto known = std::ranges::find(masks, mask->name, &Value::name);
  const auto index = known - masks.begin();
  if (known == masks.end()) masks.push_back(mask);
  return index + 1;
}

Attention Matcher::read_attention(const Node& node) {
  Attention read;
  read.heads = node.required_integer("num_heads");
  read.kv_heads = node.integer("kv_num_heads", read.heads);
  read.head_size = node.required_integer("head_size");
  read.scale = node.number("scale", 0);
  if (read.scale == 0)
    read.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(read.head_size)));
  read.softcap = node.number("softcap", 0);
  read.sinks = node.input(kHeadSink) != nullptr;
  read.window = std::max<std::int64_t>(node.integer("local_window_size", -1), 0);
  read.window_sized_cache = node.integer("sliding_window_cache", 0) != 0;
  read.int8_cache =
      node.input(kPastKey) != nullptr && node.inputs[kPastKey].type == DataType::kInt8;
  read.bidirectional_blocks = node.input(kBidirectionalBlocks) != nullptr;
  if (node.input(kQNormWeight) != nullptr) read.qk_norm = QkNorm::kEachHead;
  if (norm_of_all_heads(node, kQuery) != nullptr) read.qk_norm = QkNorm::kAllHeads;
  refuse_unless_empty(node, unsupported(read, limits_));
  read.table = table_of(node);
  read.mask = mask_of(node);
  if (decoder.attentions() > 0) {
    Attention first = decoder.attention();
    // Are known when the projections were read.
    first.qkv_bias = first.output_bias = first.output_gate = false;
    refuse_unless_empty(node, difference(read, first, Attention::kOwn));
  }
  return read;
}

// Throws Error for what the device's attention does not support, and for an attention that cannot
// become a part of one node.
void Matcher::check_attention(const Node& attention) const {
  refuse_unless_empty(attention, unsupported(attention, limits_));
  const auto expect = [&](bool fits, const std::string& what) {
    if (!fits) fail(to_string(attention), ": expected ", what);
  };
  for (const std::size_t present : {kPresentKey, kPresentValue}) {
    expect(attention.has_output(present), "present_key and present_value");
    // All layers become one node, whose outputs are complete only when all have run.
    expect(graph_.readers(attention.outputs[present].name).empty(),
           "that nothing in the graph reads present_key and present_value");
  }
  expect(attention.input(kKey) == nullptr || norm_of_all_heads(attention, kQuery) != nullptr,
         "a packed QKV projection, got query, key and value");
  const Node& first = attentions.empty() ? attention : *attentions.front();
  for (const std::size_t length : {kSeqlensK, kTotalSequenceLength}) {
    expect(attention.inputs[length].name == first.inputs[length].name,
           "seqlens_k and total_sequence_length of all layers to be the same values");
  }
  const auto same = [&](const Node& other, std::size_t input) {
    const Value* own = attention.input(input);
    const Value* others = other.input(input);
    return own == nullptr ? others == nullptr : others != nullptr && own->name == others->name;
  };
  expect(same(first, kBidirectionalBlocks),
         "bidirectional_blocks of all layers to be the same value, or none of any");
  expect(attention.integer("do_rotary", 0) == 0 || first_rotary_ == nullptr ||
             same(*first_rotary_, kPositionIds),
         "position_ids of all layers to be the same value, or none of any");
}

void Matcher::attend(const Node& attention, LayerConstants& layer) {
  check_attention(attention);
  const Attention read = read_attention(attention);
  decoder.layers.emplace_back().mixer = read;
  if (first_rotary_ == nullptr && attention.integer("do_rotary", 0) != 0) {
    first_rotary_ = &attention;
    position_ids = attention.input(kPositionIds);
    decoder.position_ids = position_ids != nullptr;
  }
  take(attention);
  attentions.push_back(&attention);
  if (read.sinks) layer.sinks = read_vector(attention, kHeadSink, read.heads);
  if (read.qk_norm == QkNorm::kAllHeads) read_norms_of_all_heads(attention, layer);
  if (read.qk_norm != QkNorm::kEachHead) return;
  layer.qk_norm = {read_vector(attention, kQNormWeight, read.head_size),
                   read_vector(attention, kKNormWeight, read.head_size)};
  check_epsilon(attention, attention.number("qk_norm_epsilon", 1e-6F));
}

// The norm of all heads that makes an attention's queries or keys; null: there is none.
const Node* Matcher::norm_of_all_heads(const Node& attention, std::size_t input) const {
  const Value* value = attention.input(input);
  const Node* norm = value == nullptr ? nullptr : graph_.producer(value->name);
  return norm != nullptr && is_norm(*norm) ? norm : nullptr;
}

// The attention behind a QKV projection; in between, there may be a Split and norms of all heads.
const Node& Matcher::attention_of(const Node& qkv) {
  const Node& next = reader(qkv.outputs[0].name, "attention");
  if (is_attention(next)) return next;
  if (!is(next, "", "Split") || next.outputs.size() != 3)
    fail(to_string(next), ": expected a FlowQKVAttention");
  const Node& attention = graph_.only_reader(next.outputs[2].name, "attention");
  if (!is_attention(attention) || attention.input(kValue) == nullptr ||
      attention.inputs[kValue].name != next.outputs[2].name)
    fail(to_string(attention), ": expected a FlowQKVAttention whose value is the last part of ",
         to_string(next));
  take(next);
  return attention;
}

// The norms of query and key, which are the first two parts of the packed projection.
void Matcher::read_norms_of_all_heads(const Node& attention, LayerConstants& layer) {
  const Value* value = attention.input(kValue);
  const Node* split = value == nullptr ? nullptr : graph_.producer(value->name);
  const std::array<std::int64_t, 2> sizes = decoder.qk_norm_sizes();
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const Node* norm = norm_of_all_heads(attention, i == 0 ? kQuery : kKey);
    if (split == nullptr || norm == nullptr || norm->inputs[0].name != split->outputs.at(i).name) {
      fail(to_string(attention), ": expected norms of the ", i == 0 ? "first" : "second",
           " part of the QKV projection");
    }
    graph_.only_reader(split->outputs.at(i).name, "a norm of all heads");
    graph_.only_reader(norm->outputs[0].name, "attention");
    take(*norm);
    layer.qk_norm.at(i) = read_vector(*norm, 1, sizes.at(i));
    check_epsilon(*norm, norm->number("epsilon", 1e-5F));
  }
}

// --- Layers --------------------------------------------------------------------------------------

}  // namespace flownpu::transformer
