// SPDX-License-Identifier: Apache-2.0
#include "ops/transformer/decoder.h"

#include <algorithm>
#include <string>

#include "ops/error.h"

namespace flownpu::transformer {
namespace {

template <typename Struct>
std::string prefix() {
  return std::string(Struct::kName) + ".";
}

// Throws Error unless layers differ only in window, table, mask, kind of cache and bits of weights.
void check_alike(const Node& node, const Decoder& decoder) {
  for (std::size_t i = 0; i < decoder.layers.size(); ++i) {
    const Attention& attention = decoder.attention(i);
    if (attention.window_sized_cache && attention.window == 0)
      fail("[", to_string(node), "] expected a window of layer ", i,
           ", whose cache has its size, got 0");
    const Layer& first = decoder.layers.front();
    const Layer& layer = decoder.layers[i];
    for (const std::string& reason : {difference(attention, first.attention(), Attention::kOwn),
                                      difference(layer.feed_forward, first.feed_forward),
                                      difference(layer, first, Layer::kOwn)})
      if (!reason.empty()) fail("[", to_string(node), "] layer ", i, ": ", reason);
  }
}

}  // namespace

Decoder Decoder::read(const Node& node) {
  Decoder decoder = read_fields<Decoder>(node, "", 1).front();
  const auto count = static_cast<std::size_t>(integer_at(node, "layers", 0, 1, 1, kMostLayers));
  decoder.layers = read_fields<Layer>(node, prefix<Layer>(), count);
  const auto attentions = read_fields<Attention>(node, prefix<Attention>(), count);
  const auto feed_forwards = read_fields<FeedForward>(node, prefix<FeedForward>(), count);
  for (std::size_t i = 0; i < count; ++i) {
    decoder.layers[i].mixer = attentions[i];
    decoder.layers[i].feed_forward = feed_forwards[i];
  }
  check_alike(node, decoder);
  if (decoder.rotated_size > decoder.attention().head_size || decoder.rotated_size % 2 != 0)
    fail("[", to_string(node),
         "] expected an even rotated_size of at most head_size = ", decoder.attention().head_size,
         ", got ", decoder.rotated_size);
  return decoder;
}

void Decoder::write(Node& node) const {
  std::vector<Attention> attentions;
  std::vector<FeedForward> feed_forwards;
  for (const Layer& layer : layers) {
    attentions.push_back(std::get<Attention>(layer.mixer));
    feed_forwards.push_back(layer.feed_forward);
  }
  node.attributes["layers"] = layer_count();
  write_fields(node, "", std::vector{*this});
  write_fields(node, prefix<Layer>(), layers);
  write_fields(node, prefix<Attention>(), attentions);
  write_fields(node, prefix<FeedForward>(), feed_forwards);
}

std::int64_t Decoder::tables() const {
  std::int64_t last = 0;
  for (std::size_t i = 0; i < layers.size(); ++i) last = std::max(last, attention(i).table);
  return last + 1;
}

std::size_t Decoder::masks() const {
  std::int64_t count = 0;
  for (std::size_t i = 0; i < layers.size(); ++i) count = std::max(count, attention(i).mask);
  return static_cast<std::size_t>(count);
}

std::array<std::int64_t, 2> Decoder::qk_norm_sizes() const {
  switch (attention().qk_norm) {
    case QkNorm::kNone:
      return {0, 0};
    case QkNorm::kEachHead:
      return {attention().head_size, attention().head_size};
    case QkNorm::kAllHeads:
      return {attended(), attention().kv_heads * attention().head_size};
  }
  fail("expected a known norm of queries and keys");
}

// For the model's own sizes, without a device's padding.
std::int64_t Decoder::multiply_adds() const {
  const std::int64_t layer = packed_heads() + attended() + feed_forward().multiply_adds();
  return (layer * layer_count() + vocabulary) * hidden;
}

void check_values_of_decoder(const Node& node, const Decoder& decoder, std::size_t extra) {
  const std::vector<DataType> cache{DataType::kBFloat16, DataType::kFloat16, DataType::kFloat32,
                                    DataType::kInt8};
  std::vector<std::vector<DataType>> inputs{
      {DataType::kFloat32}, {DataType::kInt32}, {DataType::kInt32}};
  std::vector<std::vector<DataType>> outputs{{DataType::kFloat32}};
  for (std::size_t part = 0; part < 2 * decoder.layers.size(); ++part) {
    inputs.push_back(cache);
    outputs.push_back(cache);
  }
  if (decoder.attention().bidirectional_blocks) inputs.push_back({DataType::kInt32});
  if (decoder.position_ids) inputs.push_back({DataType::kInt64});
  const std::size_t tables = decoder.given_tables ? static_cast<std::size_t>(decoder.tables()) : 0;
  inputs.resize(inputs.size() + decoder.masks() + 2 * tables, {DataType::kFloat32});
  const std::size_t given = node.inputs.size() - std::min(extra, node.inputs.size());
  const std::vector<Value> first(node.inputs.begin(),
                                 node.inputs.begin() + static_cast<std::ptrdiff_t>(given));
  check_values(node, "input", first, inputs);
  check_values(node, "output", node.outputs, outputs);
}

}  // namespace flownpu::transformer
