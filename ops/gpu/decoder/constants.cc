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

}  // namespace

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
  const std::size_t layer = 4 + 2 * norms + (decoder.attention().has_qk_norm() ? 2 : 0);
  const std::size_t left_out = decoder.post_norms() ? 1 : 0;
  return decoder.layers.size() * layer - left_out + norms + 1 +
         2 * static_cast<std::size_t>(decoder.tables());
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
  for (const transformer::LayerConstants& layer : constants.layers) {
    for (const transformer::Q4NXWeight* weight :
         {&layer.qkv, &layer.output, &layer.gate_up, &layer.down})
      add(weight->blocks);
    for (const float* norm : layer.norms) add(norm);
    if (!decoder.attention().has_qk_norm()) continue;
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
  Reader read(context, node, node.inputs.size() - std::min(count, node.inputs.size()), found);
  const std::int64_t attention = decoder.attended();
  for (std::size_t i = 0; i < decoder.layers.size(); ++i) {
    LayerConstants& layer = found.layers.emplace_back();
    layer.qkv = read.weight({decoder.packed_heads(), decoder.hidden});
    layer.output = read.weight({decoder.hidden, attention});
    layer.gate_up = read.weight({decoder.feed_forward().size, decoder.hidden, 2});
    layer.down = read.weight({decoder.hidden, decoder.feed_forward().size});
    layer.first = read.norms(decoder, i > 0);
    layer.middle = read.norms(decoder, true);
    if (!decoder.attention().has_qk_norm()) continue;
    layer.q_norm = read.vector(Shape{decoder.attention().head_size});
    layer.k_norm = read.vector(Shape{decoder.attention().head_size});
  }
  found.last = read.norms(decoder, true);
  found.head = read.weight({decoder.vocabulary, decoder.hidden});
  const Shape angles{decoder.positions, decoder.attention().head_size / 2};
  for (std::int64_t table = 0; table < decoder.tables(); ++table) {
    Buffer cosines = read.vector(angles);
    found.rotary.push_back({std::move(cosines), read.vector(angles)});
  }
  return found;
}

}  // namespace flownpu::gpu
