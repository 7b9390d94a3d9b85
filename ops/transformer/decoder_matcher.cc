// SPDX-License-Identifier: Apache-2.0
#include "ops/transformer/decoder_matcher.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

#include "ops/error.h"
#include "ops/formats/q4nx.h"
#include "ops/nodes/q4nx_moe.h"
#include "ops/transformer/graph/operators.h"
#include "ops/transformer/matcher.h"
#include "ops/transformer/paged.h"

namespace flownpu::transformer {

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

// The QKV projection before an attention; throws Error if there is none.
const Node* Matcher::first_projection(const Node& attention) const {
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
  return projection;
}

Entry Matcher::first_entry(const Node& first_mixer) {
  const Node* projection =
      is_attention(first_mixer) ? first_projection(first_mixer) : projection_before(first_mixer);
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

// The value after a Reshape that gives rows of tokens the stream's shape again, as exporters write
// it after experts; without one, the value itself. What is added to the stream has all of its
// elements, so that a shape with which it can be added leaves their order.
std::string_view Matcher::reshaped(std::string_view value) {
  const Node& reader = graph_.only_reader(value, "a norm with the residual");
  if (!is(reader, "", "Reshape") || reader.inputs[0].name != value) return value;
  take(reader);
  return reader.outputs[0].name;
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
             .normalized_experts = gate_up.integer("normalize_routing_weights", 0) != 0,
             .expert_vectors = std::ranges::any_of(
                 std::array{kMoeBias, kMoeGateUpBias, kMoeDownBias, kMoeLogitsBias, kMoeScales},
                 [&](MoeInput input) { return gate_up.input(input) != nullptr; }),
             .swiglu_alpha = gate_up.number("swiglu_alpha", 1),
             .swiglu_beta = gate_up.number("swiglu_beta", 0),
             .swiglu_limit = gate_up.number("swiglu_limit", 0)};
    refuse_unless_empty(gate_up, unsupported(found, limits_));
    refuse_unless_empty(gate_up, difference(found, decoder.feed_forward()));
    if (const auto size = gate_up.required_integer("hidden_size"); size != decoder.hidden)
      fail(to_string(gate_up), ": expected hidden_size = ", decoder.hidden, ", got ", size);
    const Value* router = gate_up.input(kMoeRouter);
    if (router == nullptr || router->constant == nullptr)
      fail(to_string(gate_up), ": expected a router that is an initializer");
    if (!limits_.special_experts && gate_up.input(kMoeBias) != nullptr)
      fail(to_string(gate_up), ": expected experts without a bias of their choice");
    if (const std::string special = special_experts(gate_up);
        !limits_.special_experts && !special.empty())
      fail(to_string(gate_up), ": expected experts without ", special);
    if (post_norms_.value_or(false) || !norms_before_)
      fail(to_string(gate_up), ": expected a norm before the experts, and none after attention");
    std::tie(layer.gate_up, layer.down) = read_first_expert(gate_up);
    mixtures.push_back(&gate_up);
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

std::string_view Matcher::attended(std::string_view x, LayerConstants& layer) {
  const Node* gate = nullptr;
  const Node* gated = nullptr;
  for (const Node* node : graph_.readers(x)) {
    const auto& readers = graph_.readers(node->outputs[0].name);
    const bool opens = readers.size() == 1 && is(*readers[0], "", "Sigmoid");
    if (limits_.states && norms_before_ && is_projection(*node) && opens) gate = node;
  }
  const Node& qkv = gate == nullptr ? projection(x, "the QKV projection", limits_.biases)
                                    : projection_beside(x, *gate);
  const Node& attention = attention_of(qkv);
  attend(attention, layer);
  Attention& read = decoder.layers.back().attention();
  std::string_view output = attention.outputs[kAttended].name;
  if (gate != nullptr) {
    const Node& open = *graph_.readers(gate->outputs[0].name).front();
    gated = &graph_.only_reader(output, "the gate of attention's output");
    if (!is(*gated, "", "Mul") || &graph_.only_reader(open.outputs[0].name, "the same") != gated)
      fail(to_string(*gated), ": expected a Mul of attention's output with ", to_string(open));
    for (const Node* node : {gate, &open, gated}) take(*node);
    take_gates(*gate, layer);
    check_product(*gate, decoder.attended(), decoder.hidden);
    output = gated->outputs[0].name;
  }
  read.output_gate = gate != nullptr;
  if (read.output_gate != decoder.attention().output_gate)
    fail(to_string(qkv), ": expected a gate of attention's output in all layers, or in none");
  check_product(qkv, decoder.packed_heads(), decoder.hidden);
  layer.qkv = read_q4nx_weight(qkv);
  layer.qkv_bias = bias_of(qkv, "QKV projection", read.qkv_bias);
  if (read.output_gate && read.qkv_bias)
    fail(to_string(qkv), ": expected no bias beside a gate of attention's output");
  return output;
}

// The projection of `x` that is its only one beside a gate's.
const Node& Matcher::projection_beside(std::string_view x, const Node& gate) {
  std::vector<const Node*> others = graph_.readers(x);
  std::erase(others, &gate);
  if (others.size() != 1 || !is_projection(*others.front()))
    fail(to_string(gate), ": expected one other projection of '", x,
         "', of queries, keys and values");
  take(*others.front());
  return *others.front();
}

Entry Matcher::layer(const Entry& entry) {
  LayerConstants layer;
  const Node* convolution = convolution_of(entry.normalised);
  const std::string_view made = convolution == nullptr
                                    ? attended(entry.normalised, layer)
                                    : mixed(entry.normalised, *convolution, layer);
  return finish_layer(entry, std::move(layer), made);
}

// A layer from its output projection on; `mixed`: what that reads.
Entry Matcher::finish_layer(const Entry& entry, LayerConstants layer, std::string_view mixed) {
  const Node& output = projection(mixed, "the output projection", limits_.biases);
  std::string_view attended = output.outputs[0].name;
  const float output_factor = update_factor(attended);
  if (output_factor != 1 && output.input(kProductBias) != nullptr)
    fail(to_string(output), ": expected no factor of a product with a bias");
  const Entry middle = next_entry(entry, attended);
  const Node& last = feed_forward(middle.normalised, layer);
  check_product(output, decoder.hidden, decoder.output_columns(decoder.layers.back()));
  layer.output = read_q4nx_weight(output);
  layer.output.factor = output_factor;
  bool biased = false;
  layer.output_bias = bias_of(output, "output projection", biased);
  if (biased && !decoder.layers.back().has_attention())
    fail(to_string(output), ": expected no bias in a layer that keeps a state");
  if (biased) decoder.layers.back().attention().output_bias = true;
  std::int64_t eight_bits = 0;
  if (layer.gates && layer.gates->eight_bits() != layer.qkv.eight_bits())
    fail(to_string(output),
         ": expected the projections of the layer's input in weights of as many ",
         "bits as those of its gates");
  for (const Q4NXWeight* weight : {&layer.down, &layer.gate_up, &layer.output, &layer.qkv})
    eight_bits = 2 * eight_bits + (weight->eight_bits() ? 1 : 0);
  decoder.layers.back().eight_bits = eight_bits;
  layer.norms = entry.weights;
  const bool post_norms = post_norms_.value_or(false);  // known since the entry `middle`
  if (!post_norms && !norms_before_)
    fail(to_string(output), ": expected a norm before the QKV projection, or after this one");
  decoder.layers.back().post_norms = post_norms;
  decoder.layers.back().norms_before = norms_before_;
  // Nothing is added before the first layer, so that there is no post-norm.
  while (layer.norms.size() < (post_norms ? 2 : 1))
    layer.norms.insert(layer.norms.begin(), nullptr);
  layer.norms.insert(layer.norms.end(), middle.weights.begin(), middle.weights.end());
  std::string_view update = last.outputs[0].name;
  if (decoder.feed_forward().experts > 0) update = reshaped(update);
  const float factor = update_factor(update);
  if (factor != 1 && decoder.feed_forward().experts > 0)
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
  } else if (block_table(*attentions.front()) != nullptr && is(selection, "", "Gather")) {
    take(selection);
    check_last_tokens(graph_, selection, attentions.front()->inputs[kTotalSequenceLength].name);
    selected = selection.outputs[0].name;
  } else if (!is(selection, "", "GatherND") || selection.inputs[0].name != entry.normalised) {
    fail(to_string(selection), ": expected a GatherND that selects the last token");
  } else {
    take(selection);
    if (attentions.empty()) fail(to_string(selection), ": expected attention in some layer");
    check_last_token(graph_, selection, attentions.front()->inputs[kSeqlensK].name);
    selected = selection.outputs[0].name;
  }
  head = &projection(selected, "the LM head");
  decoder.vocabulary = head->required_integer("M");
  check_product(*head, decoder.vocabulary, decoder.hidden);
  constants.head = read_q4nx_weight(*head);
  constants.final_norms = entry.weights;
  decoder.head_eight_bits = constants.head.eight_bits();
  if (!entry.sum.empty() && !graph_.readers(entry.sum).empty())
    fail(to_string(*entry.norm), ": expected that nothing reads the sum after the last layer");
  check_multiple(*first, "hidden size", decoder.hidden, limits_);
  if (decoder.has_states() && decoder.attention().sinks)
    fail(to_string(*attentions.front()), ": expected no head_sink among layers that keep states");
  if (decoder.has_states() && decoder.attention().bidirectional_blocks)
    fail(to_string(*attentions.front()), ": expected no bidirectional_blocks among layers that ",
         "keep states");
  if (decoder.has_states() && decoder.feed_forward().experts > 0)
    fail(to_string(*mixtures.front()),
         ": expected a dense feed-forward in layers that keep states");
  check_multiple(*attentions.front(), "head size", decoder.attention().head_size, limits_);
}

void Matcher::match(const Node& first_mixer) {
  Entry entry = first_entry(first_mixer);
  // The LM head reads the output of a norm with the residual, and no mixer reads its own.
  const auto is_mixers = [&](const Node* projection) {
    if (!is_projection(*projection)) return false;
    return std::ranges::any_of(graph_.readers(projection->outputs[0].name), [](const Node* next) {
      return is_attention(*next) || is(*next, "", "Split") || is_convolution(*next);
    });
  };
  const auto goes_on = [&] {
    if (!norms_before_) return entry.sum == entry.normalised;
    return std::ranges::any_of(graph_.readers(entry.normalised), is_mixers);
  };
  do {
    entry = layer(entry);
  } while (goes_on());
  if (decoder.positions == 0)
    fail(to_string(first_mixer), ": expected RoPE in some layer, whose table tells how many ",
         "positions there are");
  if (decoder.given_tables && std::ranges::count(tables, RotaryValues{}) != 0)
    fail(to_string(first_mixer), ": expected RoPE in all layers, if the graph makes tables");
  finish(entry);
  // A layer without the bias that others have gets zeros.
  for (bool Attention::* const biased : {&Attention::qkv_bias, &Attention::output_bias}) {
    const bool some = std::ranges::any_of(decoder.layers, [&](const Layer& layer) {
      return layer.has_attention() && layer.attention().*biased;
    });
    for (Layer& layer : decoder.layers)
      if (layer.has_attention()) layer.attention().*biased = some;
  }
}

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
  for (const StateValues& layer : states)
    node.outputs.insert(node.outputs.end(), layer.presents.begin(), layer.presents.end());
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
  const auto state = std::ranges::find_if(nodes, [&](const Node& node) {
    return node.op_type == "LinearAttention" || node.op_type == "CausalConvWithState";
  });
  if (state != nodes.end() && !limits.states)
    fail(to_string(*state), ": expected attention in each layer, and ", limits.means,
         " have no place for a layer with a state");
  Matcher found(graph, limits);
  found.match(state < attention ? *state : *attention);
  return std::move(static_cast<FoundDecoder&>(found));
}

}  // namespace flownpu::transformer
