// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/decoder/constants.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>

#include "ops/error.h"
#include "ops/gpu/decoder/forward_pass.h"
#include "ops/gpu/operators/run.h"
#include "ops/transformer/decoder_call.h"

namespace flownpu::gpu {
namespace {

// Alignment in bytes of what kernels read with a CPU's widest vectors.
constexpr std::uintptr_t kAlignment = 64;

// The attribute of write_factors(): two numbers for each layer.
constexpr const char* kFactors = "update_factors";

// Sizes of a projection's weight; with gating it has two parts of these, one below the other.
struct WeightSizes {
  std::int64_t rows;
  std::int64_t columns;
  std::int64_t parts = 1;
};

class Reader {
 public:
  Reader(Context& context, const Node& node, std::size_t first, PlacedConstants& into)
      : context_(context), node_(node), next_(first), into_(into) {}

  Weight weight(const WeightSizes& sizes) {
    const Value& value = next();
    const std::int64_t rows = sizes.parts * q4nx::row_blocks(sizes.rows) * q4nx::kBlockRows;
    const std::optional<q4nx::Layout> layout =
        value.shape ? q4nx::layout_of(*value.shape) : std::nullopt;
    if (!layout || value.type != DataType::kUInt8 || value.constant == nullptr ||
        !(*value.shape == q4nx::blocks_shape(rows, sizes.columns, *layout)))
      refuse(value,
             "Q4NX blocks of " + std::to_string(rows) + " x " + std::to_string(sizes.columns));
    return {.blocks = blocks(value), .layout = *layout};
  }

  Buffer vector(const Shape& shape) {
    const Value& value = next();
    if (value.type != DataType::kFloat32 || value.constant == nullptr || !value.shape ||
        !(*value.shape == shape))
      refuse(value, "float " + to_string(shape));
    return upload(value, value.shape->elements() * static_cast<std::int64_t>(sizeof(float)));
  }

  // The same, or as many times `fill` in the place of an absent input.
  Buffer vector_or(float fill, const Shape& shape) {
    if (next_ >= node_.inputs.size() || !node_.inputs[next_].name.empty()) return vector(shape);
    ++next_;
    return repeated(fill, shape);
  }

  Buffer repeated(float value, const Shape& shape) {
    const std::vector<float> values(static_cast<std::size_t>(shape.elements()), value);
    Buffer buffer = context_.allocate(values.size() * sizeof(float));
    context_.write(buffer, std::as_bytes(std::span(values)));
    return buffer;
  }

  // Cosines and sines of a table; without RoPE these are 1 and 0. The graph makes others run by
  // run.
  PlacedConstants::Rotary table(const transformer::Decoder& decoder) {
    const std::int64_t half =
        (decoder.partly_rotated() ? decoder.rotated_size : decoder.attention().head_size) / 2;
    const Shape of_tokens{ForwardPass::most_tokens(decoder), half};
    if (decoder.given_tables) return {repeated(1, of_tokens), repeated(0, of_tokens), false};
    const bool by_position = next_ < node_.inputs.size() && !node_.inputs[next_].name.empty();
    const Shape size = by_position ? Shape{decoder.positions, half} : of_tokens;
    Buffer cosines = vector_or(1, size);
    return {std::move(cosines), vector_or(0, size), by_position};
  }

  // The constants of a mixer that keeps a state; its states are not read.
  std::vector<Buffer> state(const transformer::Decoder& decoder, const transformer::Layer& layer) {
    std::vector<Buffer> found;
    if (const auto* delta = std::get_if<transformer::GatedDelta>(&layer.mixer)) {
      const Shape rates{decoder.hidden, delta->value_heads};
      const Shape heads{delta->value_heads};
      for (const Shape& shape : {Shape{delta->channels(), 1, delta->taps}, rates, rates, heads,
                                 heads, Shape{delta->value_size}})
        found.push_back(vector(shape));
    } else if (const auto* one = std::get_if<transformer::ShortConvolution>(&layer.mixer)) {
      found.push_back(vector(Shape{decoder.hidden, 1, one->taps}));
    }
    next_ += decoder.states_of(layer).size();
    return found;
  }

  MixtureWeights mixture() {
    const std::size_t left = node_.inputs.size() - std::min(next_, node_.inputs.size());
    const auto values = std::span(node_.inputs)
                            .subspan(node_.inputs.size() - left)
                            .first(std::min(left, MixtureWeights::kValues));
    next_ += MixtureWeights::kValues;
    return place_mixture(values, [&](const Value& value) {
      return value.type == DataType::kUInt8
                 ? blocks(value)
                 : upload(value, static_cast<std::int64_t>(value.bytes()));
    });
  }

  EntryNorms norms(const transformer::Decoder& decoder, bool adds) {
    EntryNorms norms;
    if (decoder.post_norms() && adds) norms.added = vector(Shape{decoder.hidden});
    norms.sum = vector(Shape{decoder.hidden});
    return norms;
  }

 private:
  const Value& next() {
    if (next_ >= node_.inputs.size())
      fail("[", to_string(node_), "] expected more constants than ", node_.inputs.size(),
           " inputs: compile again");
    return node_.inputs[next_++];
  }

  [[noreturn]] void refuse(const Value& value, const std::string& expected) const {
    fail("[", to_string(node_), "] expected the constant '", value.name, "' to be ", expected,
         ", got ", name_of(value.type), " ", value.shape ? to_string(*value.shape) : "[?]");
  }

  Buffer upload(const Value& value, std::int64_t bytes) {
    const auto size = static_cast<std::size_t>(bytes);
    check_bytes(size, "'" + value.name + "'");
    Buffer buffer = context_.allocate(size);
    context_.write(buffer, {static_cast<const std::byte*>(value.constant), size});
    into_.copied_bytes += bytes;
    return buffer;
  }

  Buffer blocks(const Value& value) {
    const std::int64_t bytes = value.shape.value_or(Shape{0}).elements();
    check_bytes(static_cast<std::size_t>(bytes), "'" + value.name + "'");
    Buffer used = in_place(context_, value);
    if (used.handle() == nullptr) return upload(value, bytes);
    into_.mapped_bytes += bytes;
    return used;
  }

  Context& context_;
  const Node& node_;
  std::size_t next_;
  PlacedConstants& into_;
};

// Layers without attention have none of what it may have.
transformer::Attention attention_of(const transformer::Layer& layer) {
  return layer.has_attention() ? layer.attention() : transformer::Attention();
}

std::array<float, 2> factors_of(const Node& node, std::size_t layer) {
  const auto found = node.attributes.find(kFactors);
  if (found == node.attributes.end()) return {1, 1};
  const auto* all = std::get_if<std::vector<float>>(&found->second);
  if (all == nullptr || all->size() < 2 * layer + 2)
    fail("[", to_string(node), "] expected ", kFactors, " of each layer: compile again");
  return {(*all)[2 * layer], (*all)[2 * layer + 1]};
}

}  // namespace

std::int64_t gate_rows(const transformer::Decoder& decoder, const transformer::Layer& layer) {
  if (const auto* delta = std::get_if<transformer::GatedDelta>(&layer.mixer))
    return delta->values();
  return layer.has_attention() && layer.attention().output_gate ? decoder.attended() : 0;
}

Buffer in_place(Context& context, const Value& blocks) {
  if (!context.facts().reads_host_memory || blocks.owner == nullptr ||
      reinterpret_cast<std::uintptr_t>(blocks.constant) % kAlignment != 0)
    return {};
  const std::int64_t bytes = blocks.shape.value_or(Shape{0}).elements();
  return context.use(
      {static_cast<const std::byte*>(blocks.constant), static_cast<std::size_t>(bytes)},
      blocks.owner);
}

std::size_t count_of_constants(const transformer::Decoder& decoder) {
  const auto norms = static_cast<std::size_t>(decoder.entry_norms());
  const std::size_t left_out = decoder.post_norms() ? 1 : 0;
  const std::size_t tables =
      decoder.given_tables ? 0 : 2 * static_cast<std::size_t>(decoder.tables());
  std::size_t count = norms + 1 + tables - left_out;
  for (const transformer::Layer& layer : decoder.layers) {
    const transformer::Attention attention = attention_of(layer);
    count += decoder.feed_forward().experts > 0 ? 2 + MixtureWeights::kValues : 4;
    count += 2 * norms + (gate_rows(decoder, layer) > 0 ? 1 : 0);
    count += attention.has_qk_norm() ? 2 : 0;
    for (const bool has : {attention.qkv_bias, attention.output_bias, attention.sinks})
      count += has ? 1 : 0;
  }
  return count;
}

void write_factors(Node& node, const transformer::DecoderConstants& constants) {
  std::vector<float> factors;
  for (const transformer::LayerConstants& layer : constants.layers)
    factors.insert(factors.end(), {layer.output.factor, layer.down.factor});
  if (std::ranges::any_of(factors, [](float factor) { return factor != 1; }))
    node.attributes[kFactors] = factors;
}

std::vector<Value> values_of_constants(const transformer::Decoder& decoder,
                                       const transformer::DecoderConstants& constants,
                                       const std::vector<const Node*>& mixtures,
                                       const std::vector<Node>& nodes) {
  std::unordered_map<const void*, const Value*> values;
  for (const Node& node : nodes) {
    for (const Value& input : node.inputs) {
      if (input.constant != nullptr) values.emplace(input.constant, &input);
    }
  }
  std::vector<Value> all;
  const auto add = [&](const void* constant) {
    if (constant != nullptr) all.push_back(*values.at(constant));
  };
  const auto add_or_absent = [&](const void* constant) {
    all.push_back(constant == nullptr ? Value{} : *values.at(constant));
  };
  for (std::size_t i = 0; i < constants.layers.size(); ++i) {
    const transformer::LayerConstants& layer = constants.layers[i];
    add(layer.qkv.blocks);
    if (layer.gates) add(layer.gates->blocks);
    add(layer.output.blocks);
    for (std::size_t input = 0; input < MixtureWeights::kValues && !mixtures.empty(); ++input) {
      const Value* value = mixtures[i]->input(kMoeRouter + input);
      all.push_back(value == nullptr ? Value{} : *value);
    }
    if (mixtures.empty()) add(layer.gate_up.blocks);
    if (mixtures.empty()) add(layer.down.blocks);
    for (const float* norm : layer.norms) add(norm);
    const transformer::Attention attention = attention_of(decoder.layers[i]);
    if (attention.has_qk_norm())
      for (const float* norm : layer.qk_norm) add(norm);
    if (attention.qkv_bias) add_or_absent(layer.qkv_bias);
    if (attention.output_bias) add_or_absent(layer.output_bias);
    if (attention.sinks) add(layer.sinks);
  }
  for (const float* norm : constants.final_norms) add(norm);
  add(constants.head.blocks);
  if (decoder.given_tables) return all;
  for (const transformer::RotaryTable& table : constants.rotary) {
    add_or_absent(table.cosine);
    add_or_absent(table.sine);
  }
  return all;
}

PlacedConstants place_constants(Context& context, const transformer::Decoder& decoder,
                                const Node& node) {
  const std::size_t count = count_of_constants(decoder);
  PlacedConstants found;
  const std::size_t first = node.inputs.size() - std::min(count, node.inputs.size());
  Reader read(context, node, first, found);
  Reader read_states(context, node,
                     first - std::min(transformer::count_of_state_inputs(decoder), first), found);
  for (std::size_t i = 0; i < decoder.layers.size(); ++i) {
    const transformer::Layer& own = decoder.layers[i];
    const std::int64_t gates = gate_rows(decoder, own);
    LayerConstants& layer = found.layers.emplace_back();
    layer.state = read_states.state(decoder, own);
    layer.qkv = read.weight({decoder.input_rows(own) - gates, decoder.hidden});
    if (gates > 0) layer.gates = read.weight({gates, decoder.hidden});
    layer.output = read.weight({decoder.hidden, decoder.output_columns(own)});
    if (decoder.feed_forward().experts > 0) {
      layer.experts = read.mixture();
    } else {
      layer.gate_up = read.weight({decoder.feed_forward().size, decoder.hidden, 2});
      layer.down = read.weight({decoder.hidden, decoder.feed_forward().size});
    }
    layer.first = read.norms(decoder, i > 0);
    layer.middle = read.norms(decoder, true);
    const auto [of_output, of_down] = factors_of(node, i);
    layer.output.factor = of_output;
    layer.down.factor = of_down;
    const transformer::Attention attention = attention_of(own);
    if (attention.has_qk_norm()) {
      layer.q_norm = read.vector(Shape{attention.head_size});
      layer.k_norm = read.vector(Shape{attention.head_size});
    }
    if (attention.qkv_bias) layer.qkv_bias = read.vector_or(0, Shape{decoder.packed_heads()});
    if (attention.output_bias) layer.output_bias = read.vector_or(0, Shape{decoder.hidden});
    if (attention.sinks) layer.sinks = read.vector(Shape{attention.heads});
  }
  found.last = read.norms(decoder, true);
  found.head = read.weight({decoder.vocabulary, decoder.hidden});
  for (std::int64_t table = 0; table < decoder.tables(); ++table)
    found.rotary.push_back(read.table(decoder));
  return found;
}

}  // namespace flownpu::gpu
