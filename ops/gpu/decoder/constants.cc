// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/decoder/constants.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>

#include "ops/error.h"
#include "ops/gpu/operators/run.h"
#include "ops/transformer/decoder_call.h"

namespace flownpu::gpu {
namespace {

// Alignment in bytes of what kernels read with a CPU's widest vectors.
constexpr std::uintptr_t kAlignment = 64;

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

bool has_qk_norm(const transformer::Layer& layer) {
  return layer.has_attention() && layer.attention().has_qk_norm();
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
  std::size_t count = norms + 1 + 2 * static_cast<std::size_t>(decoder.tables()) - left_out;
  for (const transformer::Layer& layer : decoder.layers)
    count += 4 + 2 * norms + (gate_rows(decoder, layer) > 0 ? 1 : 0) + (has_qk_norm(layer) ? 2 : 0);
  return count;
}

std::vector<Value> values_of_constants(const transformer::Decoder& decoder,
                                       const transformer::DecoderConstants& constants,
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
  for (std::size_t i = 0; i < constants.layers.size(); ++i) {
    const transformer::LayerConstants& layer = constants.layers[i];
    add(layer.qkv.blocks);
    if (layer.gates) add(layer.gates->blocks);
    for (const transformer::Q4NXWeight* weight : {&layer.output, &layer.gate_up, &layer.down})
      add(weight->blocks);
    for (const float* norm : layer.norms) add(norm);
    if (!has_qk_norm(decoder.layers[i])) continue;
    for (const float* norm : layer.qk_norm) add(norm);
  }
  for (const float* norm : constants.final_norms) add(norm);
  add(constants.head.blocks);
  for (const transformer::RotaryTable& table : constants.rotary) {
    add(table.cosine);
    add(table.sine);
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
    layer.gate_up = read.weight({decoder.feed_forward().size, decoder.hidden, 2});
    layer.down = read.weight({decoder.hidden, decoder.feed_forward().size});
    layer.first = read.norms(decoder, i > 0);
    layer.middle = read.norms(decoder, true);
    if (!has_qk_norm(own)) continue;
    layer.q_norm = read.vector(Shape{decoder.attention().head_size});
    layer.k_norm = read.vector(Shape{decoder.attention().head_size});
  }
  found.last = read.norms(decoder, true);
  found.head = read.weight({decoder.vocabulary, decoder.hidden});
  const std::int64_t rotated =
      decoder.partly_rotated() ? decoder.rotated_size : decoder.attention().head_size;
  const Shape angles{decoder.positions, rotated / 2};
  for (std::int64_t table = 0; table < decoder.tables(); ++table) {
    Buffer cosines = read.vector(angles);
    found.rotary.push_back({std::move(cosines), read.vector(angles)});
  }
  return found;
}

}  // namespace flownpu::gpu
