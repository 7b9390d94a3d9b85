// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/run/layer_states.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <utility>

#include "ops/error.h"
#include "ops/formats/numbers.h"
#include "ops/transformer/decoder_call.h"
#include "ops/transformer/graph/operators.h"

namespace flownpu::npu {
namespace {

using Rows = LayerStates::Rows;
using transformer::GatedDelta;

Tensor floats(std::span<float> values, const Shape& shape) {
  return {.data = values.data(), .type = DataType::kFloat32, .shape = shape};
}

// A step of the host with its working memory.
class HostStep {
 public:
  HostStep(const Device& host, Node node, std::size_t outputs) {
    for (std::size_t i = 0; i < outputs; ++i)
      node.outputs.push_back({.name = "output " + std::to_string(i), .shape = std::nullopt});
    step_ = host.prepare(node);
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs) {
    const std::size_t bytes = step_->scratch_bytes(inputs);
    // Steps want their working memory aligned to 64 bytes.
    std::size_t space = bytes + 64;
    memory_.resize(std::max(memory_.size(), space));
    void* scratch = memory_.data();
    std::align(64, bytes, scratch, space);
    step_->run(inputs, outputs, {static_cast<std::byte*>(scratch), bytes});
  }

 private:
  std::unique_ptr<Step> step_;
  std::vector<std::byte> memory_;
};

// A node of the operator with inputs that runs feed, but for `constants`.
Node node_of(std::string_view domain, std::string_view op_type, std::string name,
             std::vector<Value> inputs) {
  Node node;
  node.name = std::move(name);
  node.domain = domain;
  node.op_type = op_type;
  node.since_version = op_type == "MatMul" ? 13 : 1;
  node.inputs = std::move(inputs);
  return node;
}

Value fed(const char* name) { return {.name = name, .shape = std::nullopt}; }

Node convolution_of(const Node& node, const Value& taps, const char* activation) {
  Node found = node_of(transformer::kMicrosoft, "CausalConvWithState", node.name + ", convolution",
                       {fed("x"), taps, Value{}, fed("past")});
  found.attributes = {{"activation", std::string(activation)}, {"channels_last", std::int64_t{1}}};
  return found;
}

// Copies `columns` elements from `first` on of each row.
void copy_part(std::span<const float> rows, std::size_t line, std::size_t first,
               std::span<float> part, std::size_t columns) {
  for (std::size_t row = 0; row * line < rows.size(); ++row)
    std::memcpy(part.data() + row * columns, rows.data() + row * line + first,
                columns * sizeof(float));
}

}  // namespace

class LayerStates::Mixer {
 public:
  virtual ~Mixer() = default;
  // `constants`: the layer's, where this run has them. `before` and `after`: its states.
  virtual void mix(std::span<const Tensor> constants, std::span<const Tensor> before,
                   std::span<const Tensor> after, const Rows& given) = 0;
  // LayerStates::before_delta, for the convolution's state, and after_delta.
  virtual void before_delta(std::span<const Tensor> /*constants*/, const Tensor& /*before*/,
                            const Tensor& /*after*/, const Rows& /*given*/,
                            std::span<std::uint16_t> /*tokens*/, std::size_t /*line*/) {
    fail("[FlowNPU] expected a layer with a gated delta rule");
  }
  virtual void after_delta(std::span<const Tensor> /*constants*/, const Rows& /*given*/,
                           std::span<float> /*delta*/) {
    fail("[FlowNPU] expected a layer with a gated delta rule");
  }
};

namespace {

class DeltaMixer final : public LayerStates::Mixer {
 public:
  DeltaMixer(const Node& node, std::span<const Value> constants, const GatedDelta& sizes,
             float epsilon, const Device& host)
      : sizes_(sizes),
        convolution_(host, convolution_of(node, constants[0], "silu"), 2),
        a_(host, product(node, constants[1]), 1),
        b_(host, product(node, constants[2]), 1),
        rates_(host,
               node_of(transformer::kMicrosoft, "LinearAttentionGate", node.name + ", rates",
                       {fed("a"), constants[3], constants[4], fed("b")}),
               2),
        unit_(host, unit(node), 1),
        delta_(host, delta(node, sizes), 2),
        norm_(host, norm(node, constants[5], epsilon), 1) {}

  void mix(std::span<const Tensor> constants, std::span<const Tensor> before,
           std::span<const Tensor> after, const Rows& given) override {
    prepare(constants, before[0], after[0], given);
    made_.resize(given.mixed.size());
    const Shape heads = of_heads(given);
    delta_.run(std::array{q_, k_, v_, before[1], floats(decay_, heads), floats(beta_, heads)},
               std::array{floats(made_, Shape{1, given.count, sizes_.values()}), after[1]});
    after_delta(constants, given, made_);
  }

  void before_delta(std::span<const Tensor> constants, const Tensor& before, const Tensor& after,
                    const Rows& given, std::span<std::uint16_t> tokens, std::size_t line) override {
    prepare(constants, before, after, given);
    const auto keys = static_cast<std::size_t>(sizes_.key_size);
    const auto values = static_cast<std::size_t>(sizes_.value_size);
    const auto heads = static_cast<std::size_t>(sizes_.value_heads);
    const auto key_heads = static_cast<std::size_t>(sizes_.key_heads);
    if (line < 2 * keys + values + 2 * sizeof(float) / sizeof(std::uint16_t))
      fail("[FlowNPU] expected lines for a token's q, k, v and rates, got ", line, " elements");
    const float scale = 1 / std::sqrt(static_cast<float>(keys));
    const auto narrow = [](const float* from, std::size_t count, float factor, std::uint16_t* to) {
      for (std::size_t i = 0; i < count; ++i) to[i] = to_bfloat16(factor * from[i]);
    };
    for (std::size_t i = 0; (i + 1) * line <= tokens.size(); ++i) {
      std::uint16_t* head = tokens.data() + i * line;
      std::array<float, 2> rates{1, 0};  // nothing is forgotten, and nothing written
      std::memset(head, 0, line * sizeof *head);
      if (i < static_cast<std::size_t>(given.count) * heads) {
        const std::size_t shared = heads / key_heads;
        const std::size_t key = (i / heads * key_heads + i % heads / shared) * keys;
        narrow(q_.as<const float>() + key, keys, scale, head);
        narrow(k_.as<const float>() + key, keys, 1, head + keys);
        narrow(v_.as<const float>() + i * values, values, 1, head + 2 * keys);
        rates = {std::exp(decay_[i]), beta_[i]};
      }
      std::memcpy(head + 2 * keys + values, rates.data(), sizeof rates);
    }
  }

  void after_delta(std::span<const Tensor> constants, const Rows& given,
                   std::span<float> delta) override {
    const Shape shape{1, given.count, sizes_.values()};
    const Tensor gate = part(gate_, given.projected, sizes_.channels() + sizes_.values(),
                             sizes_.channels(), sizes_.values(), given.count);
    norm_.run(std::array{floats(delta, shape), constants[5], gate},
              std::array{floats(given.mixed, shape)});
  }

 private:
  static Node product(const Node& node, const Value& weight) {
    return node_of("", "MatMul", node.name + ", rates", {fed("x"), weight});
  }
  static Node unit(const Node& node) {
    Node found = node_of("", "LpNormalization", node.name + ", length", {fed("x")});
    found.attributes = {{"axis", std::int64_t{-1}}, {"p", std::int64_t{2}}};
    return found;
  }
  static Node delta(const Node& node, const GatedDelta& sizes) {
    Node found = node_of(transformer::kMicrosoft, "LinearAttention", node.name + ", delta rule",
                         {fed("q"), fed("k"), fed("v"), fed("past"), fed("decay"), fed("beta")});
    found.attributes = {
        {"q_num_heads", sizes.key_heads},
        {"kv_num_heads", sizes.value_heads},
        {"update_rule", std::string("gated_delta")},
        {"scale", static_cast<float>(1 / std::sqrt(static_cast<double>(sizes.key_size)))}};
    return found;
  }
  static Node norm(const Node& node, const Value& weight, float epsilon) {
    Node found = node_of(transformer::kMicrosoft, "GatedRMSNorm", node.name + ", norm",
                         {fed("x"), weight, fed("gate")});
    found.attributes = {{"epsilon", epsilon}};
    return found;
  }

  Shape of_heads(const Rows& given) const { return Shape{1, given.count, sizes_.value_heads}; }

  // `columns` columns of rows of `line` elements, from `first` on.
  static Tensor part(std::vector<float>& to, std::span<const float> from, std::int64_t line,
                     std::int64_t first, std::int64_t columns, std::int64_t rows) {
    to.resize(static_cast<std::size_t>(rows * columns));
    copy_part(from, static_cast<std::size_t>(line), static_cast<std::size_t>(first), to,
              static_cast<std::size_t>(columns));
    return floats(to, Shape{1, rows, columns});
  }

  // Makes queries, keys, values, decays and betas of the rows.
  void prepare(std::span<const Tensor> constants, const Tensor& before, const Tensor& after,
               const Rows& given) {
    const std::int64_t rows = given.count;
    const std::int64_t keys = sizes_.key_heads * sizes_.key_size;
    const std::int64_t channels = sizes_.channels();
    convolved_.resize(static_cast<std::size_t>(rows * channels));
    convolution_.run(
        std::array{part(channels_, given.projected, channels + sizes_.values(), 0, channels, rows),
                   constants[0], Tensor{}, before},
        std::array{floats(convolved_, Shape{1, rows, channels}), after});
    q_ = in_units(part(query_, convolved_, channels, 0, keys, rows), units_of_q_);
    k_ = in_units(part(key_, convolved_, channels, keys, keys, rows), units_of_k_);
    v_ = part(value_, convolved_, channels, 2 * keys, sizes_.values(), rows);

    const auto columns = static_cast<std::int64_t>(given.x.size()) / rows;
    const Tensor x = floats(given.x, Shape{1, rows, columns});
    const auto room = [&](std::vector<float>& to) {
      to.resize(static_cast<std::size_t>(rows * sizes_.value_heads));
      return floats(to, of_heads(given));
    };
    const Tensor a = room(a_of_x_);
    const Tensor b = room(b_of_x_);
    a_.run(std::array{x, constants[1]}, std::array{a});
    b_.run(std::array{x, constants[2]}, std::array{b});
    rates_.run(std::array{a, constants[3], constants[4], b}, std::array{room(decay_), room(beta_)});
  }

  // Each head divided by its length.
  Tensor in_units(Tensor heads, std::vector<float>& made) {
    const Shape shape = heads.shape;
    heads.shape = Shape{1, shape[1], sizes_.key_heads, sizes_.key_size};
    made.resize(static_cast<std::size_t>(shape.elements()));
    unit_.run(std::array{heads}, std::array{floats(made, heads.shape)});
    return floats(made, shape);
  }

  GatedDelta sizes_;
  Tensor q_, k_, v_;  // of the last rows
  HostStep convolution_, a_, b_, rates_, unit_, delta_, norm_;
  std::vector<float> channels_, convolved_, query_, key_, value_, units_of_q_, units_of_k_, a_of_x_,
      b_of_x_, decay_, beta_, made_, gate_;
};

class ConvolutionMixer final : public LayerStates::Mixer {
 public:
  ConvolutionMixer(const Node& node, const Value& taps, std::int64_t hidden, const Device& host)
      : hidden_(static_cast<std::size_t>(hidden)),
        convolution_(host, convolution_of(node, taps, "none"), 2) {}

  void mix(std::span<const Tensor> constants, std::span<const Tensor> before,
           std::span<const Tensor> after, const Rows& given) override {
    gated_.resize(given.mixed.size());
    convolved_.resize(given.mixed.size());
    for (std::size_t i = 0; i < given.mixed.size(); ++i) {
      const float* row = given.projected.data() + i / hidden_ * 3 * hidden_ + i % hidden_;
      gated_[i] = row[0] * row[2 * hidden_];
    }
    const Shape shape{1, given.count, static_cast<std::int64_t>(hidden_)};
    convolution_.run(std::array{floats(gated_, shape), constants[0], Tensor{}, before[0]},
                     std::array{floats(convolved_, shape), after[0]});
    for (std::size_t i = 0; i < given.mixed.size(); ++i) {
      const float* row = given.projected.data() + i / hidden_ * 3 * hidden_ + i % hidden_;
      given.mixed[i] = row[hidden_] * convolved_[i];
    }
  }

 private:
  std::size_t hidden_;
  HostStep convolution_;
  std::vector<float> gated_, convolved_;
};

}  // namespace

struct LayerStates::StateLayer {
  std::int64_t hidden = 0, projected = 0, mixed = 0;
  std::size_t constants = 0;
  std::unique_ptr<Mixer> mixer;
  std::span<const Tensor> given;  // the constants, where this run has them
  std::vector<State> states;
};

LayerStates::~LayerStates() = default;

LayerStates::LayerStates(const Node& node, const transformer::Decoder& decoder,
                         const Device& host) {
  std::span<const Value> values(node.inputs);
  values = values.last(transformer::count_of_state_inputs(decoder));
  for (std::size_t i = 0; i < decoder.layers.size(); ++i) {
    const transformer::Layer& layer = decoder.layers[i];
    StateLayer& made = layers_.emplace_back();
    if (layer.has_attention()) continue;
    made.hidden = decoder.hidden;
    made.projected = decoder.input_rows(layer);
    made.mixed = decoder.output_columns(layer);
    made.constants = transformer::count_of_state_constants(layer);
    made.states.resize(decoder.states_of(layer).size());
    Node named;
    named.name = node.name + ", layer " + std::to_string(i);
    const auto constants = values.first(made.constants);
    if (const auto* delta = std::get_if<GatedDelta>(&layer.mixer))
      made.mixer = std::make_unique<DeltaMixer>(named, constants, *delta, decoder.epsilon, host);
    else
      made.mixer =
          std::make_unique<ConvolutionMixer>(named, constants.front(), decoder.hidden, host);
    values = values.subspan(made.constants + made.states.size());
  }
}

Tensor LayerStates::State::next() {
  if (current.data != present.data) return present;
  other.resize(static_cast<std::size_t>(present.shape.elements()));
  return floats(other, present.shape);
}

void LayerStates::begin(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
                        std::int64_t count) {
  for (StateLayer& layer : layers_) {
    layer.given = inputs.first(layer.constants);
    inputs = inputs.subspan(layer.constants);
    for (std::size_t i = 0; i < layer.states.size(); ++i) {
      if (!(inputs[i].shape == outputs[i].shape))
        fail("expected a state of shape ", to_string(outputs[i].shape), ", got ",
             to_string(inputs[i].shape));
      layer.states[i].current = inputs[i];
      layer.states[i].present = outputs[i];
    }
    inputs = inputs.subspan(layer.states.size());
    outputs = outputs.subspan(layer.states.size());
  }
  transformer::check_tokens_of_states(inputs.front(), 0, count);
}

LayerStates::StateLayer& LayerStates::checked(std::size_t layer, const Rows& given) {
  if (layer >= layers_.size() || layers_[layer].mixer == nullptr)
    fail("[FlowNPU] expected a layer that keeps a state, got layer ", layer);
  StateLayer& own = layers_[layer];
  const auto of_rows = [&](std::size_t size, std::int64_t columns) {
    return size == 0 || static_cast<std::int64_t>(size) == given.count * columns;
  };
  if (given.count < 1 || !of_rows(given.x.size(), own.hidden) ||
      !of_rows(given.projected.size(), own.projected) || !of_rows(given.mixed.size(), own.mixed))
    fail("[FlowNPU] expected ", given.count, " rows of ", own.hidden, ", ", own.projected, " and ",
         own.mixed, " elements for layer ", layer, ", got ", given.x.size(), ", ",
         given.projected.size(), " and ", given.mixed.size());
  return own;
}

void LayerStates::mix(std::size_t layer, const Rows& given) {
  StateLayer& own = checked(layer, given);
  std::vector<Tensor> before, after;
  for (State& state : own.states) {
    before.push_back(state.current);
    after.push_back(state.next());
  }
  own.mixer->mix(own.given, before, after, given);
  for (std::size_t i = 0; i < own.states.size(); ++i) own.states[i].current = after[i];
}

void LayerStates::before_delta(std::size_t layer, const Rows& given,
                               std::span<std::uint16_t> tokens, std::size_t line,
                               std::span<std::uint16_t> states) {
  StateLayer& own = checked(layer, given);
  const Tensor& state = own.states.back().current;
  if (static_cast<std::int64_t>(states.size()) != state.shape.elements())
    fail("[FlowNPU] expected room for a state of ", state.shape.elements(), " elements, got ",
         states.size());
  State& elements = own.states.front();
  const Tensor next = elements.next();
  own.mixer->before_delta(own.given, elements.current, next, given, tokens, line);
  elements.current = next;
  std::transform(state.as<const float>(), state.as<const float>() + states.size(), states.begin(),
                 to_bfloat16);
}

void LayerStates::after_delta(std::size_t layer, const Rows& given, std::span<float> delta,
                              std::span<const std::uint16_t> states) {
  StateLayer& own = checked(layer, given);
  State& state = own.states.back();
  const Tensor next = state.next();
  if (static_cast<std::int64_t>(states.size()) != next.shape.elements())
    fail("[FlowNPU] expected a state of ", next.shape.elements(), " elements, got ", states.size());
  std::transform(states.begin(), states.end(), next.as<float>(), from_bfloat16);
  state.current = next;
  own.mixer->after_delta(own.given, given, delta);
}

void LayerStates::finish() {
  for (StateLayer& layer : layers_) {
    for (State& state : layer.states) {
      if (state.current.data != state.present.data)
        std::memcpy(state.present.data, state.current.data, state.present.bytes());
      state.current = state.present = Tensor{};
    }
  }
}

}  // namespace flownpu::npu
