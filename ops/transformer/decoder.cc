// SPDX-License-Identifier: Apache-2.0
#include "ops/transformer/decoder.h"

#include <algorithm>
#include <array>
#include <string>

#include "ops/error.h"

namespace flownpu::transformer {
namespace {

template <typename Struct>
std::string prefix() {
  return std::string(Struct::kName) + ".";
}

// The kinds of mixers, in the order of Mixer.
constexpr std::array<std::string_view, 3> kMixers{Attention::kName, GatedDelta::kName,
                                                  ShortConvolution::kName};

// A layer's mixer, if it is of this kind, else that of the first layer that has such a one.
template <typename Kind>
Kind mixer_or_first(const Decoder& decoder, const Layer& layer) {
  if (const Kind* own = std::get_if<Kind>(&layer.mixer)) return *own;
  for (const Layer& other : decoder.layers)
    if (const Kind* found = std::get_if<Kind>(&other.mixer)) return *found;
  return {};
}

template <typename Kind>
void write_mixers(Node& node, const Decoder& decoder) {
  std::vector<Kind> mixers;
  mixers.reserve(decoder.layers.size());
  for (const Layer& layer : decoder.layers) mixers.push_back(mixer_or_first<Kind>(decoder, layer));
  const auto has = [](const Layer& layer) { return std::holds_alternative<Kind>(layer.mixer); };
  if (std::ranges::any_of(decoder.layers, has)) write_fields(node, prefix<Kind>(), mixers);
}

template <typename Kind>
void read_mixers(const Node& node, Decoder& decoder, const std::vector<std::size_t>& kinds) {
  const std::size_t kind = Mixer(Kind()).index();
  if (std::ranges::find(kinds, kind) == kinds.end()) return;
  const auto mixers = read_fields<Kind>(node, prefix<Kind>(), kinds.size());
  for (std::size_t i = 0; i < kinds.size(); ++i)
    if (kinds[i] == kind) decoder.layers[i].mixer = mixers[i];
}

// Throws Error unless layers differ only in mixer, window, table, mask, kind of cache and bits of
// weights.
void check_alike(const Node& node, const Decoder& decoder) {
  if (decoder.attentions() == 0)
    fail("[", to_string(node), "] expected attention in some layer, got none");
  for (std::size_t i = 0; i < decoder.layers.size(); ++i) {
    const Layer& first = decoder.layers.front();
    const Layer& layer = decoder.layers[i];
    std::string reason = difference(layer.feed_forward, first.feed_forward);
    if (reason.empty()) reason = difference(layer, first, Layer::kOwn);
    if (reason.empty() && layer.has_attention()) {
      const Attention& attention = layer.attention();
      if (attention.window_sized_cache && attention.window == 0)
        fail("[", to_string(node), "] expected a window of layer ", i,
             ", whose cache has its size, got 0");
      reason = difference(attention, decoder.attention(), Attention::kOwn);
    }
    if (!reason.empty()) fail("[", to_string(node), "] layer ", i, ": ", reason);
  }
}

}  // namespace

Decoder Decoder::read(const Node& node) {
  Decoder decoder = read_fields<Decoder>(node, "", 1).front();
  const auto count = static_cast<std::size_t>(integer_at(node, "layers", 0, 1, 1, kMostLayers));
  decoder.layers = read_fields<Layer>(node, prefix<Layer>(), count);
  std::vector<std::size_t> kinds(count);
  if (node.attributes.contains("mixers")) {
    for (std::size_t i = 0; i < count; ++i)
      kinds[i] = static_cast<std::size_t>(
          integer_at(node, "mixers", i, count, 0, std::int64_t{kMixers.size()} - 1));
  }
  read_mixers<Attention>(node, decoder, kinds);
  read_mixers<GatedDelta>(node, decoder, kinds);
  read_mixers<ShortConvolution>(node, decoder, kinds);
  const auto feed_forwards = read_fields<FeedForward>(node, prefix<FeedForward>(), count);
  for (std::size_t i = 0; i < count; ++i) decoder.layers[i].feed_forward = feed_forwards[i];
  check_alike(node, decoder);
  if (decoder.rotated_size > decoder.attention().head_size || decoder.rotated_size % 2 != 0)
    fail("[", to_string(node),
         "] expected an even rotated_size of at most head_size = ", decoder.attention().head_size,
         ", got ", decoder.rotated_size);
  return decoder;
}

void Decoder::write(Node& node) const {
  std::vector<FeedForward> feed_forwards;
  std::vector<std::int64_t> kinds;
  for (const Layer& layer : layers) {
    kinds.push_back(static_cast<std::int64_t>(layer.mixer.index()));
    feed_forwards.push_back(layer.feed_forward);
  }
  node.attributes["layers"] = layer_count();
  if (has_states()) node.attributes["mixers"] = kinds;
  write_fields(node, "", std::vector{*this});
  write_fields(node, prefix<Layer>(), layers);
  write_mixers<Attention>(node, *this);
  write_mixers<GatedDelta>(node, *this);
  write_mixers<ShortConvolution>(node, *this);
  write_fields(node, prefix<FeedForward>(), feed_forwards);
}

const Attention& Decoder::attention(std::size_t number) const {
  for (const Layer& layer : layers)
    if (layer.has_attention() && number-- == 0) return layer.attention();
  fail("expected a decoder with more layers that have attention");
}

std::size_t Decoder::attentions() const {
  return static_cast<std::size_t>(std::ranges::count_if(layers, &Layer::has_attention));
}

std::vector<Shape> Decoder::states_of(const Layer& layer) const {
  if (const auto* delta = std::get_if<GatedDelta>(&layer.mixer))
    return {Shape{1, delta->taps - 1, delta->channels()},
            Shape{1, delta->value_heads, delta->key_size, delta->value_size}};
  if (const auto* convolution = std::get_if<ShortConvolution>(&layer.mixer))
    return {Shape{1, convolution->taps - 1, hidden}};
  return {};
}

std::int64_t Decoder::input_rows(const Layer& layer) const {
  if (const auto* delta = std::get_if<GatedDelta>(&layer.mixer))
    return delta->channels() + delta->values();
  if (!layer.has_attention()) return 3 * hidden;
  return packed_heads() + (layer.attention().output_gate ? attended() : 0);
}

std::int64_t Decoder::output_columns(const Layer& layer) const {
  if (const auto* delta = std::get_if<GatedDelta>(&layer.mixer)) return delta->values();
  return layer.has_attention() ? attended() : hidden;
}

std::int64_t Decoder::tables() const {
  std::int64_t last = 0;
  for (std::size_t i = 0; i < attentions(); ++i) last = std::max(last, attention(i).table);
  return last + 1;
}

std::size_t Decoder::masks() const {
  std::int64_t count = 0;
  for (std::size_t i = 0; i < attentions(); ++i) count = std::max(count, attention(i).mask);
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
  std::int64_t rows = vocabulary;
  for (const Layer& layer : layers)
    rows += input_rows(layer) + output_columns(layer) + layer.feed_forward.multiply_adds();
  return rows * hidden;
}

void check_values_of_decoder(const Node& node, const Decoder& decoder, std::size_t extra) {
  const std::vector<DataType> cache{DataType::kBFloat16, DataType::kFloat16, DataType::kFloat32,
                                    DataType::kInt8};
  std::vector<std::vector<DataType>> inputs{
      {DataType::kFloat32}, {DataType::kInt32}, {DataType::kInt32}};
  std::vector<std::vector<DataType>> outputs{{DataType::kFloat32}};
  for (std::size_t part = 0; part < 2 * decoder.attentions(); ++part) {
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
  for (const Layer& layer : decoder.layers)
    outputs.resize(outputs.size() + decoder.states_of(layer).size(), {DataType::kFloat32});
  check_values(node, "input", first, inputs);
  check_values(node, "output", node.outputs, outputs);
}

}  // namespace flownpu::transformer
