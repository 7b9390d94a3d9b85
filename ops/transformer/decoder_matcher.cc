// SPDX-License-Identifier: Apache-2.0
#include "ops/transformer/decoder_matcher.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <string_view>
#include <utility>

#include "ops/error.h"
#include "ops/formats/q4nx.h"
#include "ops/transformer/operators.h"

namespace flownpu::transformer {
namespace {

void refuse_unless_empty(const Node& node, const std::string& reason) {
  if (!reason.empty()) fail(to_string(node), ": ", reason);
}

// An entry to the residual stream: the output of attention or feed-forward is added (in a model
// with post-norms it is normalised first), and the sum is normalised for the next projection, or
// read as it is.
struct Entry {
  const Node* norm = nullptr;
  std::string_view sum;         // the residual stream
  std::string_view normalised;  // what the next projection reads
  std::vector<const float*> weights;
};

class Matcher : public FoundDecoder {
 public:
  Matcher(const GraphWalk& graph, const DecoderLimits& limits) : graph_(graph), limits_(limits) {}

  // Throws Error that names the node in the way.
  void match(const Node& first_attention);

 private:
  Entry first_entry(const Node& attention);
  const Node& reader(std::string_view x, std::string_view what) const;
  const Node* norm_of_all_heads(const Node& attention, std::size_t input) const;
  const Node& attention_of(const Node& qkv);
  void read_norms_of_all_heads(const Node& attention, LayerConstants& layer);
  Entry layer(const Entry& entry);
  void attend(const Node& attention, LayerConstants& layer);
  const Node& feed_forward(std::string_view x, LayerConstants& layer);
  Attention read_attention(const Node& node);
  void check_attention(const Node& attention) const;
  Entry next_entry(const Entry& entry, std::string_view update);
  const Node* post_norm(std::string_view update);
  float update_factor(std::string_view& update);
  void finish(const Entry& entry);

  void take(const Node& node);
  const Node& projection(std::string_view x, const char* what, bool biased = false);
  const float* bias_of(const Node& projection, const char* what, bool& has);
  void check_product(const Node& node, std::int64_t rows, std::int64_t columns,
                     bool gated = false) const;
  void check_epsilon(const Node& node, float epsilon);
  // The index of the rotary table that an attention uses; layers without RoPE share an empty one.
  std::int64_t table_of(const Node& attention);
  void check_table(const Node& attention, const Value* table);
  std::int64_t mask_of(const Node& attention);

  const GraphWalk& graph_;
  const DecoderLimits& limits_;
  std::optional<bool> post_norms_;  // unknown before the first projection's output
  bool norms_before_ = true;
  // The first attention with RoPE: all others have its position_ids.
  const Node* first_rotary_ = nullptr;
};

void Matcher::take(const Node& node) { taken.insert(&node); }

// The only reader of `x`; of a residual stream without norms before its readers, the only one
// besides the next sum.
const Node& Matcher::reader(std::string_view x, std::string_view what) const {
  if (norms_before_) return graph_.only_reader(x, what);
  std::vector<const Node*> found = graph_.readers(x);
  std::erase_if(found, [](const Node* node) {
    return is(*node, "", "Add") || is(*node, "", "Shape") || is_residual_norm(*node);
  });
  return found.size() == 1 ? *found.front() : graph_.only_reader(x, what);
}

// The projection that is the only reader of `x`. `biased`: whether it may have a bias.
const Node& Matcher::projection(std::string_view x, const char* what, bool biased) {
  const Node& node = reader(x, what);
  if (!is_projection(node)) fail(to_string(node), ": expected a Q4NXMatMul, ", what);
  if (node.inputs[0].name != x) fail(to_string(node), ": expected '", x, "' to be its X");
  if (!biased && node.input(kProductBias) != nullptr)
    fail(to_string(node), ": ", what, " has a bias, which ", limits_.means, " have no place for");
  if (node.input(kProductResidual) != nullptr)
    fail(to_string(node), ": expected no residual in ", what);
  take(node);
  return node;
}

void Matcher::check_product(const Node& node, std::int64_t rows, std::int64_t columns,
                            bool gated) const {
  const std::int64_t m = node.required_integer("M");
  const std::int64_t k = node.required_integer("K");
  const std::string gating = node.text("gating", "none");
  const std::string_view wanted =
      gated ? kActivations[static_cast<std::size_t>(decoder.feed_forward().activation)] : "none";
  if (m == rows && k == columns && gating == wanted) return;
  fail(to_string(node), ": expected M = ", rows, ", K = ", columns, " and gating = ", wanted,
       " as in the layers before, got ", m, ", ", k, " and ", gating);
}

// The bias of a projection; null if it has none, which counts as zeros if other layers have one.
// `has`: set where it has one.
const float* Matcher::bias_of(const Node& projection, const char* what, bool& has) {
  const Value* bias = projection.input(kProductBias);
  if (bias == nullptr) return nullptr;
  if (bias->constant == nullptr || bias->type != DataType::kFloat32) {
    fail(to_string(projection), ": expected the ", what, "'s bias to be an initializer, float");
  }
  has = true;
  return static_cast<const float*>(bias->constant);
}

void Matcher::check_epsilon(const Node& node, float epsilon) {
  if (decoder.epsilon == 0) decoder.epsilon = epsilon;
  if (epsilon != decoder.epsilon)
    fail(to_string(node), ": expected the epsilon of all norms to be ", decoder.epsilon, ", got ",
         epsilon);
}

// --- Attention -----------------------------------------------------------------------------------

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
  read.window = std::max<std::int64_t>(node.integer("local_window_size", -1), 0);
  read.window_sized_cache = node.integer("sliding_window_cache", 0) != 0;
  read.bidirectional_blocks = node.input(kBidirectionalBlocks) != nullptr;
  if (node.input(kQNormWeight) != nullptr) read.qk_norm = QkNorm::kEachHead;
  if (norm_of_all_heads(node, kQuery) != nullptr) read.qk_norm = QkNorm::kAllHeads;
  refuse_unless_empty(node, unsupported(read, limits_));
  read.table = table_of(node);
  read.mask = mask_of(node);
  if (!decoder.layers.empty()) {
    Attention first = decoder.attention();
    first.qkv_bias = first.output_bias = false;  // are known when the projections were read
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

Entry Matcher::first_entry(const Node& attention) {
  const Node* projection = graph_.producer(attention.inputs[kQuery].name);
  if (const Node* norm = norm_of_all_heads(attention, kQuery);
      norm != nullptr && limits_.norms_after) {
    const Node* split = graph_.producer(norm->inputs[0].name);
    if (split != nullptr && is(*split, "", "Split"))
      projection = graph_.producer(split->inputs[0].name);
  }
  if (projection == nullptr || !is_projection(*projection)) {
    std::string got;
    if (projection != nullptr && is(*projection, "", "Add")) {
      got = ", got an Add: " + limits_.means + " have no place for a bias";
    } else if (projection != nullptr && is_norm(*projection)) {
      got = limits_.norms_after ? ", got a norm of all heads at once that reads no part of one"
                                : ", got a norm of all heads at once: " + limits_.means +
                                      " have one of each head, or none";
    }
    fail(to_string(attention), ": expected a Q4NXMatMul that makes its query, keys and values",
         got);
  }
  const Node* norm = graph_.producer(projection->inputs[0].name);
  // Without norms before its parts, the stream is also read by the sum with attention's output.
  norms_before_ = !limits_.norms_after || (norm != nullptr && is_norm(*norm)) ||
                  std::ranges::none_of(graph_.readers(projection->inputs[0].name),
                                       [](const Node* node) { return is(*node, "", "Add"); });
  if (!norms_before_) {
    decoder.hidden = projection->required_integer("K");
    first = projection;
    const std::string_view stream = projection->inputs[0].name;
    return {.norm = projection, .sum = stream, .normalised = stream, .weights = {}};
  }
  if (norm == nullptr || !is_norm(*norm)) {
    fail(to_string(*projection),
         ": expected a SimplifiedLayerNormalization before the first layer's QKV projection");
  }
  decoder.hidden = projection->required_integer("K");
  check_epsilon(*norm, norm->number("epsilon", 1e-5F));
  take(*norm);
  first = norm;
  return {.norm = norm,
          .sum = norm->inputs[0].name,
          .normalised = norm->outputs[0].name,
          .weights = {read_vector(*norm, 1, decoder.hidden)}};
}

// The number by which the graph multiplies a projection's output, which becomes that product; 1 if
// it does not.
float Matcher::update_factor(std::string_view& update) {
  const Node& reader = graph_.only_reader(update, "a norm with the residual");
  if (!limits_.scaled_updates || !is(reader, "", "Mul")) return 1;
  const Value& other = reader.inputs[reader.inputs[0].name == update ? 1 : 0];
  if (other.constant == nullptr || other.type != DataType::kFloat32 || !other.shape ||
      other.shape->elements() != 1)
    return 1;
  take(reader);
  update = reader.outputs[0].name;
  return *static_cast<const float*>(other.constant);
}

// The norm that is applied to a projection's output before it is added; null if there is none.
const Node* Matcher::post_norm(std::string_view update) {
  const Node& reader = graph_.only_reader(update, "a norm with the residual");
  const bool found = is_norm(reader);
  if (!post_norms_) post_norms_ = found;
  if (found == *post_norms_) {
    if (found) take(reader);
    return found ? &reader : nullptr;
  }
  fail(to_string(reader), ": expected ",
       *post_norms_ ? "a SimplifiedLayerNormalization" : "a SkipSimplifiedLayerNormalization",
       " to read '", update, "', as after the projections before");
}

// `update`: a projection's output, after its factor.
Entry Matcher::next_entry(const Entry& entry, std::string_view update) {
  Entry next;
  const Node* post = post_norm(update);
  if (post != nullptr) {
    update = post->outputs[0].name;
    check_epsilon(*post, post->number("epsilon", 1e-5F));
    next.weights.push_back(read_vector(*post, 1, decoder.hidden));
  }
  const Node& norm = graph_.only_reader(update, "a norm with the residual");
  const bool only_sum = !norms_before_ && is(norm, "", "Add");
  if (!is_residual_norm(norm) && !only_sum) {
    fail(to_string(norm), ": expected a SkipSimplifiedLayerNormalization that adds '", update,
         "' to the residual stream");
  }
  const auto reads = [&](std::size_t input, std::string_view value) {
    return norm.input(input) != nullptr && norm.inputs[input].name == value;
  };
  if (!(reads(0, entry.sum) && reads(1, update)) && !(reads(1, entry.sum) && reads(0, update))) {
    fail(to_string(norm), ": expected it to add '", update, "' to the residual stream '", entry.sum,
         "'");
  }
  // The model's first residual stream comes from outside and may be read there.
  if (entry.norm != first) {
    if (norms_before_)
      graph_.only_reader(entry.sum, "the next norm with the residual");
    else
      reader(entry.sum, "the next projection");
  }
  take(norm);
  next.norm = &norm;
  next.normalised = norm.outputs[0].name;
  if (only_sum) {
    next.sum = next.normalised;
    next.weights.push_back(nullptr);
    return next;
  }
  if (norm.input(3) != nullptr) fail(to_string(norm), ": expected no bias");
  check_epsilon(norm, norm.number("epsilon", 1e-5F));
  next.weights.push_back(read_vector(norm, 2, decoder.hidden));
  if (norm.has_output(3)) next.sum = norm.outputs[3].name;
  return next;
}

// The feed-forward that reads `x`; returns its last node.
const Node& Matcher::feed_forward(std::string_view x, LayerConstants& layer) {
  FeedForward& found = decoder.layers.back().feed_forward;
  const Node& next = reader(x, "the gate and up projection");
  const bool experts = is(next, kDomain, "Q4NXMoE");
  const Node& gate_up = experts ? next : projection(x, "the gate and up projection");
  const std::string gating = gate_up.text("gating", experts ? "swiglu" : "none");
  const auto activation = std::ranges::find(kActivations, gating);
  if (decoder.layers.size() == 1 && activation == kActivations.end())
    fail(to_string(gate_up), ": expected gating = geglu or swiglu, got ", gating);
  if (experts) {
    found = {.size = gate_up.required_integer("expert_size"),
             .activation = static_cast<Activation>(activation - kActivations.begin()),
             .experts = gate_up.required_integer("num_experts"),
             .experts_per_token = gate_up.required_integer("experts_per_token"),
             .normalized_experts = gate_up.integer("normalize_routing_weights", 0) != 0};
    refuse_unless_empty(gate_up, unsupported(found, limits_));
    refuse_unless_empty(gate_up, difference(found, decoder.feed_forward()));
    if (const auto size = gate_up.required_integer("hidden_size"); size != decoder.hidden)
      fail(to_string(gate_up), ": expected hidden_size = ", decoder.hidden, ", got ", size);
    take(gate_up);
    return gate_up;
  }
  if (decoder.layers.size() == 1) {
    found.size = gate_up.required_integer("M");
    found.activation = static_cast<Activation>(activation - kActivations.begin());
  }
  const Node& down = projection(gate_up.outputs[0].name, "the down projection");
  found = decoder.feed_forward();
  check_product(gate_up, found.size, decoder.hidden, true);
  check_product(down, decoder.hidden, found.size);
  layer.gate_up = read_q4nx_weight(gate_up);
  layer.down = read_q4nx_weight(down);
  return down;
}

Entry Matcher::layer(const Entry& entry) {
  LayerConstants layer;
  const Node& qkv = projection(entry.normalised, "the QKV projection", limits_.biases);
  const Node& attention = attention_of(qkv);
  attend(attention, layer);
  const Node& output =
      projection(attention.outputs[kOutput].name, "the output projection", limits_.biases);
  std::string_view attended = output.outputs[0].name;
  const float output_factor = update_factor(attended);
  if (output_factor != 1 && output.input(kProductBias) != nullptr)
    fail(to_string(output), ": expected no factor of a product with a bias");
  const Entry middle = next_entry(entry, attended);
  const Node& last = feed_forward(middle.normalised, layer);
  check_product(qkv, decoder.packed_heads(), decoder.hidden);
  check_product(output, decoder.hidden, decoder.attended());
  layer.qkv = read_q4nx_weight(qkv);
  Attention& read = decoder.layers.back().attention();
  layer.qkv_bias = bias_of(qkv, "QKV projection", read.qkv_bias);
  layer.output = read_q4nx_weight(output);
  layer.output.factor = output_factor;
  layer.output_bias = bias_of(output, "output projection", read.output_bias);
  layer.norms = entry.weights;
  const bool post_norms = post_norms_.value_or(false);  // known since the entry `middle`
  if (!post_norms && !norms_before_)
    fail(to_string(qkv), ": expected a norm before the QKV projection, or after ",
         to_string(output));
  decoder.layers.back().post_norms = post_norms;
  decoder.layers.back().norms_before = norms_before_;
  // Nothing is added before the first layer, so that there is no post-norm.
  while (layer.norms.size() < (post_norms ? 2 : 1))
    layer.norms.insert(layer.norms.begin(), nullptr);
  layer.norms.insert(layer.norms.end(), middle.weights.begin(), middle.weights.end());
  std::string_view update = last.outputs[0].name;
  const float factor = update_factor(update);
  if (factor != 1 && layer.down.blocks == nullptr)
    fail(to_string(last), ": expected no factor of what experts make");
  layer.down.factor = factor;
  constants.layers.push_back(std::move(layer));
  return next_entry(middle, update);
}

// --- After the layers ----------------------------------------------------------------------------

void Matcher::finish(const Entry& entry) {
  const Node& selection =
      graph_.only_computing_reader(entry.normalised, "the selection of the last token");
  std::string_view selected = entry.normalised;
  if (limits_.all_logits && is_projection(selection)) {
    decoder.all_logits = true;
  } else if (is_projection(selection)) {
    fail(to_string(selection),
         ": expected a GatherND that selects the last token before the LM head; the graph computes "
         "logits of all tokens: convert it with --logits last");
  } else if (!is(selection, "", "GatherND") || selection.inputs[0].name != entry.normalised) {
    fail(to_string(selection), ": expected a GatherND that selects the last token");
  } else {
    take(selection);
    check_last_token(graph_, selection, attentions.front()->inputs[kSeqlensK].name);
    selected = selection.outputs[0].name;
  }
  head = &projection(selected, "the LM head");
  decoder.vocabulary = head->required_integer("M");
  check_product(*head, decoder.vocabulary, decoder.hidden);
  constants.head = read_q4nx_weight(*head);
  constants.final_norms = entry.weights;
  if (!entry.sum.empty() && !graph_.readers(entry.sum).empty())
    fail(to_string(*entry.norm), ": expected that nothing reads the sum after the last layer");
  check_multiple(*first, "hidden size", decoder.hidden, limits_);
  check_multiple(*attentions.front(), "head size", decoder.attention().head_size, limits_);
}

void Matcher::match(const Node& first_attention) {
  Entry entry = first_entry(first_attention);
  // The LM head reads the output of a norm with the residual, and no attention reads its own.
  const auto goes_on = [&] {
    if (!norms_before_) return entry.sum == entry.normalised;
    const auto& readers = graph_.readers(entry.normalised);
    if (readers.size() != 1 || !is_projection(*readers[0])) return false;
    const auto& then = graph_.readers(readers[0]->outputs[0].name);
    return then.size() == 1 && (is_attention(*then[0]) || is(*then[0], "", "Split"));
  };
  do {
    entry = layer(entry);
  } while (goes_on());
  if (decoder.positions == 0)
    fail(to_string(first_attention), ": expected RoPE in some layer, whose table tells how many ",
         "positions there are");
  if (decoder.given_tables && std::ranges::count(tables, RotaryValues{}) != 0)
    fail(to_string(first_attention), ": expected RoPE in all layers, if the graph makes tables");
  finish(entry);
  // A layer without the bias that others have gets zeros.
  for (bool Attention::* const biased : {&Attention::qkv_bias, &Attention::output_bias}) {
    const bool some = std::ranges::any_of(
        decoder.layers, [&](const Layer& layer) { return layer.attention().*biased; });
    for (Layer& layer : decoder.layers) layer.attention().*biased = some;
  }
}

}  // namespace

bool RotaryValues::operator==(const RotaryValues& other) const {
  const auto same = [](const Value* one, const Value* two) {
    return one == nullptr || two == nullptr ? one == two : one->name == two->name;
  };
  return same(cosine, other.cosine) && same(sine, other.sine);
}

Node FoundDecoder::node(std::string_view domain) const {
  Node node;
  node.name = first->name + " .. " + head->name;
  node.op_type = kDecoderLayers;
  node.domain = domain;
  decoder.write(node);
  const Node& attention = *attentions.front();
  node.inputs = {first->inputs[0], attention.inputs[kTotalSequenceLength],
                 attention.inputs[kSeqlensK]};
  node.outputs = {head->outputs[0]};
  for (const Node* each : attentions) {
    for (const std::size_t past : {kPastKey, kPastValue}) node.inputs.push_back(each->inputs[past]);
    for (const std::size_t present : {kPresentKey, kPresentValue})
      node.outputs.push_back(each->outputs[present]);
  }
  if (decoder.attention().bidirectional_blocks)
    node.inputs.push_back(attention.inputs[kBidirectionalBlocks]);
  if (position_ids != nullptr) node.inputs.push_back(*position_ids);
  for (const Value* mask : masks) node.inputs.push_back(*mask);
  if (decoder.given_tables) {
    for (const RotaryValues& table : tables)
      node.inputs.insert(node.inputs.end(), {*table.cosine, *table.sine});
  }
  return node;
}

FoundDecoder find_decoder(const std::vector<Node>& nodes, const GraphWalk& graph,
                          const DecoderLimits& limits) {
  const auto attention = std::ranges::find_if(nodes, is_attention);
  if (attention == nodes.end()) {
    fail(limits.who,
         " computes decoders, and there is no attention (where an exporter wrote it in "
         "operators that conversion does not know as one, convert the checkpoint itself)");
  }
  Matcher found(graph, limits);
  found.match(*attention);
  return std::move(static_cast<FoundDecoder&>(found));
}

}  // namespace flownpu::transformer
