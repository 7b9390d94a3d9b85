// SPDX-License-Identifier: Apache-2.0
// Layers that keep a state in the place of a KV cache, as conversion writes them
// (python/flownpu/convert/graph/mixers.py):
//
//   gated delta rule   QKV projection -> convolution, SiLU -> q, k of length one, v -> delta rule
//                      -> norm, times SiLU(gate projection) -> output projection
//   short convolution  projection -> B, C, x -> C * convolution(B * x) -> output projection
//
// Nodes that keep padding out of states (a mask of decay and beta, the last tokens before it) are
// taken away: a device computes tokens alone, and compares the mask with their number.
#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "ops/error.h"
#include "ops/transformer/graph/operators.h"
#include "ops/transformer/matcher.h"

namespace flownpu::transformer {
namespace {

// Inputs of CausalConvWithState, LinearAttention and LinearAttentionGate.
enum ConvolutionInput : std::uint8_t { kTaps = 1, kTapsBias = 2, kPastElements = 3 };
enum DeltaInput : std::uint8_t { kDeltaValue = 2, kPastState = 3, kDecay = 4, kBeta = 5 };
enum GateInput : std::uint8_t { kA = 0, kDtBias = 1, kDecayScale = 2, kB = 3 };

void require(const Node& node, bool fits, const char* what) {
  if (!fits) fail(to_string(node), ": expected ", what);
}

bool is_mul(const Node* node) { return node != nullptr && is(*node, "", "Mul"); }

}  // namespace

const Node* Matcher::projection_before(const Node& convolution) const {
  const Node* before = graph_.producer(convolution.inputs[0].name);
  if (is_mul(before)) {
    const Node* split = graph_.producer(before->inputs[0].name);
    before = split == nullptr ? nullptr : graph_.producer(split->inputs[0].name);
  }
  if (before == nullptr || !is_projection(*before))
    fail(to_string(convolution), ": expected a Q4NXMatMul that makes what it reads");
  return before;
}

const Node* Matcher::convolution_of(std::string_view x) const {
  if (!limits_.states) return nullptr;
  for (const Node* node : graph_.readers(x)) {
    if (!is_projection(*node)) continue;
    for (const Node* next : graph_.readers(node->outputs[0].name)) {
      if (is_convolution(*next)) return next;
      if (!is(*next, "", "Split") || next->outputs.size() != 3) continue;
      const auto& readers = graph_.readers(next->outputs[0].name);
      if (readers.size() != 1 || !is_mul(readers[0])) continue;
      for (const Node* last : graph_.readers(readers[0]->outputs[0].name))
        if (is_convolution(*last)) return last;
    }
  }
  return nullptr;
}

std::string_view Matcher::mixed(std::string_view x, const Node& convolution,
                                LayerConstants& layer) {
  const Node* projection = projection_before(convolution);
  take(*projection);
  require(*projection, projection->input(kProductBias) == nullptr,
          "no bias before a layer's state");
  layer.qkv = read_q4nx_weight(*projection);
  check_multiple(*projection, "number of rows", layer.qkv.rows, limits_);
  const bool delta = graph_.producer(convolution.inputs[0].name) == projection;
  const std::string_view made =
      delta ? gated_delta(x, convolution, layer) : short_convolution(convolution, layer);
  const Layer& own = decoder.layers.back();
  check_product(*projection,
                decoder.input_rows(own) - (layer.gates ? layer.gates->rows : std::int64_t{0}),
                decoder.hidden);
  return made;
}

// Reads the convolution's weight and states, and returns the number of its taps. Its newest
// elements may be chosen where a row is padded.
std::int64_t Matcher::read_convolution(const Node& convolution, std::string_view activation,
                                       StateValues& values) {
  require(convolution, convolution.text("activation", "none") == activation,
          "the activation of such a layer");
  require(convolution, convolution.integer("channels_last", 0) == 1, "channels_last = 1");
  require(convolution, convolution.integer("dilation", 1) == 1, "dilation = 1");
  require(convolution, convolution.input(kTapsBias) == nullptr, "no bias");
  const Value& weight = convolution.inputs[kTaps];
  const Shape size = weight.shape.value_or(Shape{});
  require(convolution,
          weight.constant != nullptr && size.rank() == 3 && weight.type == DataType::kFloat32 &&
              size[2] >= 2,
          "a weight that is an initializer, float [channels, 1, taps]");
  require(convolution, convolution.input(kPastElements) != nullptr && convolution.has_output(1),
          "past_state and present_state");
  take(convolution);
  values.constants.push_back(weight);
  values.pasts.push_back(convolution.inputs[kPastElements]);
  const Value& newest = convolution.outputs[1];
  const auto& readers = graph_.readers(newest.name);
  if (readers.empty()) {
    values.presents.push_back(newest);
    return size[2];
  }
  const Node& chosen = graph_.only_reader(newest.name, "a Where that chooses the last tokens");
  require(chosen, is(chosen, "", "Where") && chosen.inputs[1].name == newest.name,
          "a Where of the newest elements, if the row has no padding");
  const Node* before = graph_.producer(chosen.inputs[2].name);
  const Node* rows = is_mul(before) ? graph_.producer(before->inputs[0].name) : nullptr;
  require(chosen,
          rows != nullptr && is(*rows, "", "GatherND") &&
              rows->inputs[0].name == convolution.inputs[0].name,
          "the last tokens before the padding where there is some");
  for (const Node* node : {&chosen, before, rows}) take(*node);
  values.presents.push_back(chosen.outputs[0]);
  return size[2];
}

// Throws Error unless heads of `size` elements of a part of the convolution's output, divided by
// their length, are that input of the delta rule.
void Matcher::check_unit_length(const Node& delta, std::size_t input, const Value& part,
                                std::int64_t size) {
  const Node* row = graph_.producer(delta.inputs[input].name);
  const Node* unit =
      row != nullptr && is(*row, "", "Reshape") ? graph_.producer(row->inputs[0].name) : nullptr;
  const Node* heads = unit != nullptr && is(*unit, "", "LpNormalization")
                          ? graph_.producer(unit->inputs[0].name)
                          : nullptr;
  bool fits = heads != nullptr && is(*heads, "", "Reshape") && heads->inputs[0].name == part.name &&
              unit->integer("p", 2) == 2 && unit->integer("axis", -1) == -1;
  if (fits) {
    const Value& shape = heads->inputs[1];
    fits = shape.constant != nullptr && shape.shape && shape.shape->elements() == 4 &&
           static_cast<const std::int64_t*>(shape.constant)[3] == size;
  }
  require(delta, fits, "queries and keys whose heads are divided by their length");
  for (const Node* node : {row, unit, heads}) take(*node);
}

// The node that makes decay or beta; between them there may be the mask of tokens.
const Node& Matcher::masked(const Value& rate) {
  const Node* made = graph_.producer(rate.name);
  if (is_mul(made)) {
    const Value& mask = made->inputs[1];
    if (is_token == nullptr) is_token = &mask;
    require(*made, mask.constant == nullptr && mask.name == is_token->name,
            "the same mask of tokens in all layers");
    take(*made);
    made = graph_.producer(made->inputs[0].name);
  }
  if (made == nullptr || !is(*made, kMicrosoft, "LinearAttentionGate"))
    fail("expected a LinearAttentionGate that makes '", rate.name, "'");
  return *made;
}

void Matcher::read_gates(std::string_view x, const Node& delta, const GatedDelta& read,
                         StateValues& values) {
  const Node& gate = masked(delta.inputs[kDecay]);
  require(delta, &masked(delta.inputs[kBeta]) == &gate, "decay and beta of one node");
  take(gate);
  const auto rate = [&](std::size_t input) {
    const Node* product =
        gate.input(input) == nullptr ? nullptr : graph_.producer(gate.inputs[input].name);
    bool fits = product != nullptr && (is(*product, "", "MatMul") || is_dense_product(*product)) &&
                product->inputs[0].name == x && product->integer("transposed", 0) == 0;
    for (std::size_t i = 2; fits && i < product->inputs.size(); ++i)
      fits = product->input(i) == nullptr;
    if (!fits) fail(to_string(gate), ": expected products of the layer's input as a and b");
    const Value& weight = product->inputs[1];
    require(*product,
            weight.constant != nullptr && weight.type == DataType::kFloat32 &&
                weight.shape == Shape{decoder.hidden, read.value_heads},
            "a weight that is an initializer, float [D, heads]");
    take(*product);
    values.constants.push_back(weight);
  };
  rate(kA);
  rate(kB);
  for (const std::size_t input : {kDtBias, kDecayScale}) {
    read_vector(gate, input, read.value_heads);
    values.constants.push_back(gate.inputs[input]);
  }
}

// The projection whose rows are beside those of the layer's first.
void Matcher::take_gates(const Node& gate, LayerConstants& layer) {
  require(gate, gate.input(kProductBias) == nullptr && gate.input(kProductResidual) == nullptr,
          "no bias and no residual of gates");
  take(gate);
  layer.gates = read_q4nx_weight(gate);
  check_multiple(gate, "number of gates", layer.gates->rows, limits_);
}

std::string_view Matcher::gated_delta(std::string_view x, const Node& convolution,
                                      LayerConstants& layer) {
  StateValues values;
  const std::int64_t taps = read_convolution(convolution, "silu", values);
  const Node& split = graph_.only_reader(convolution.outputs[0].name, "a Split into q, k and v");
  require(split, is(split, "", "Split") && split.outputs.size() == 3, "a Split into three parts");
  const Node& delta = graph_.only_reader(split.outputs[2].name, "a delta rule");
  require(delta,
          is(delta, kMicrosoft, "LinearAttention") && delta.inputs.size() == 6 &&
              delta.inputs[kDeltaValue].name == split.outputs[2].name &&
              delta.text("update_rule", "gated_delta") == "gated_delta" && delta.has_output(1) &&
              graph_.readers(delta.outputs[1].name).empty(),
          "a LinearAttention by the gated delta rule, with states");
  const Value& past = delta.inputs[kPastState];
  const Shape state = past.shape.value_or(Shape{});
  require(delta, state.rank() == 4, "past_state of known sizes");
  const GatedDelta read{.key_heads = delta.required_integer("q_num_heads"),
                        .value_heads = delta.required_integer("kv_num_heads"),
                        .key_size = state[2],
                        .value_size = state[3],
                        .taps = taps};
  require(delta, read.key_size > 0 && read.value_size > 0 && read.value_heads % read.key_heads == 0,
          "past_state of known sizes, and heads of values in multiples of those of keys");
  const double scale = 1 / std::sqrt(static_cast<double>(read.key_size));
  require(delta, std::abs(delta.number("scale", 0) - scale) < 1e-6 * scale,
          "a scale of 1 / sqrt(key size)");
  check_unit_length(delta, 0, split.outputs[0], read.key_size);
  check_unit_length(delta, 1, split.outputs[1], read.key_size);
  decoder.layers.emplace_back().mixer = read;
  read_gates(x, delta, read, values);
  const Node& norm = graph_.only_reader(delta.outputs[0].name, "a norm with a gate");
  require(norm, is(norm, kMicrosoft, "GatedRMSNorm") && norm.text("activation", "silu") == "silu",
          "a GatedRMSNorm with SiLU");
  check_epsilon(norm, norm.number("epsilon", 1e-5F));
  read_vector(norm, 1, read.value_size);
  values.constants.push_back(norm.inputs[1]);
  const Node* gate = graph_.producer(norm.inputs[2].name);
  if (gate == nullptr || !is_projection(*gate) || gate->inputs[0].name != x)
    fail(to_string(norm), ": expected a projection of the layer's input as its gate");
  take_gates(*gate, layer);
  check_product(*gate, read.values(), decoder.hidden);
  values.pasts.push_back(past);
  values.presents.push_back(delta.outputs[1]);
  for (const Node* node : {&split, &delta, &norm}) take(*node);
  states.push_back(std::move(values));
  return norm.outputs[0].name;
}

std::string_view Matcher::short_convolution(const Node& convolution, LayerConstants& /*layer*/) {
  StateValues values;
  const std::int64_t taps = read_convolution(convolution, "none", values);
  const Node& gated = *graph_.producer(convolution.inputs[0].name);
  const Node& split = *graph_.producer(gated.inputs[0].name);
  const Node& output = graph_.only_reader(convolution.outputs[0].name, "the second gate");
  require(gated, gated.inputs[1].name == split.outputs[2].name,
          "the product of the first and third part of the projection");
  require(output,
          is_mul(&output) && std::ranges::any_of(output.inputs,
                                                 [&](const Value& input) {
                                                   return input.name == split.outputs[1].name;
                                                 }),
          "the product of the convolution with the projection's second part");
  for (const Node* node : {&gated, &split, &output}) take(*node);
  decoder.layers.emplace_back().mixer = ShortConvolution{.taps = taps};
  states.push_back(std::move(values));
  return output.outputs[0].name;
}

std::vector<Value> FoundDecoder::state_inputs() const {
  std::vector<Value> inputs;
  for (const StateValues& layer : states) {
    inputs.insert(inputs.end(), layer.constants.begin(), layer.constants.end());
    inputs.insert(inputs.end(), layer.pasts.begin(), layer.pasts.end());
  }
  if (!states.empty()) inputs.push_back(is_token == nullptr ? Value{} : *is_token);
  return inputs;
}

}  // namespace flownpu::transformer
