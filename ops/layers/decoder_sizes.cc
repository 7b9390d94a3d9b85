// SPDX-License-Identifier: Apache-2.0
#include "ops/layers/decoder_sizes.h"

#include <algorithm>

#include "ops/error.h"
#include "ops/layers/checked_node.h"

namespace flownpu::layers {
namespace {

// The largest sizes that are accepted: some ten times those of the largest models there are. They
// keep the bytes of a projection below 2^26 rows / 32 x 2^20 columns / 256 x 5120 < 2^46, so that
// computing sizes cannot overflow.
constexpr std::int64_t kMostHeads = 1 << 12;
constexpr std::int64_t kMostHeadSize = 1 << 12;
constexpr std::int64_t kMostHidden = 1 << 20;
constexpr std::int64_t kMostFeedForward = 1 << 20;
constexpr std::int64_t kMostVocabulary = 1 << 24;
constexpr std::int64_t kMostPositions = 1 << 30;
constexpr std::int64_t kMostLayers = 1 << 12;

template <typename Get>
std::vector<std::int64_t> list(const std::vector<LayerKind>& layers, const Get& get) {
  std::vector<std::int64_t> values;
  values.reserve(layers.size());
  for (const LayerKind& layer : layers) values.push_back(get(layer));
  return values;
}

}  // namespace

DecoderSizes DecoderSizes::read(const Node& node) {
  DecoderSizes sizes;
  sizes.hidden = size_attribute(node, "hidden", kMostHidden);
  sizes.heads = size_attribute(node, "heads", kMostHeads);
  sizes.kv_heads = size_attribute(node, "kv_heads", kMostHeads);
  sizes.head_size = size_attribute(node, "head_size", kMostHeadSize);
  sizes.feed_forward = size_attribute(node, "feed_forward", kMostFeedForward);
  sizes.vocabulary = size_attribute(node, "vocabulary", kMostVocabulary);
  sizes.positions = size_attribute(node, "positions", kMostPositions);
  sizes.activation = node.text("activation", "");
  sizes.post_norms = node.required_integer("post_norms") != 0;
  sizes.qk_norm = node.required_integer("qk_norm") != 0;
  sizes.qkv_bias = node.required_integer("qkv_bias") != 0;
  sizes.blocks = node.required_integer("bidirectional_blocks") != 0;
  sizes.epsilon = node.number("epsilon", 0);
  sizes.scale = node.number("scale", 0);
  sizes.softcap = node.number("softcap", 0);
  const std::vector<std::int64_t> windows = node.integers("windows");
  const std::vector<std::int64_t> tables = node.integers("tables");
  const std::vector<std::int64_t> window_sized = node.integers("sliding_window_cache");
  const auto count = static_cast<std::size_t>(size_attribute(node, "layers", kMostLayers));
  if (windows.size() != count || tables.size() != count || window_sized.size() != count) {
    fail("[", to_string(node), "] expected windows, tables and sliding_window_cache of ", count,
         " layers, got ", windows.size(), ", ", tables.size(), " and ", window_sized.size());
  }
  for (std::size_t i = 0; i < count; ++i) {
    const std::int64_t least = window_sized[i] != 0 ? 1 : 0;
    if (windows[i] < least || windows[i] > kMostPositions || tables[i] < 0 ||
        tables[i] >= kMostLayers) {
      fail("[", to_string(node), "] expected a window and a table of layer ", i, ", got ",
           windows[i], " and ", tables[i]);
    }
    sizes.layers.push_back({windows[i], tables[i], window_sized[i] != 0});
  }
  return sizes;
}

void DecoderSizes::write(Node& node) const {
  node.attributes = {
      {"hidden", hidden},
      {"heads", heads},
      {"kv_heads", kv_heads},
      {"head_size", head_size},
      {"feed_forward", feed_forward},
      {"vocabulary", vocabulary},
      {"positions", positions},
      {"activation", activation},
      {"post_norms", std::int64_t{post_norms}},
      {"qk_norm", std::int64_t{qk_norm}},
      {"qkv_bias", std::int64_t{qkv_bias}},
      {"bidirectional_blocks", std::int64_t{blocks}},
      {"epsilon", epsilon},
      {"scale", scale},
      {"layers", layer_count()},
      {"windows", list(layers, [](const LayerKind& kind) { return kind.window; })},
      {"tables", list(layers, [](const LayerKind& kind) { return kind.table; })},
      {"sliding_window_cache",
       list(layers, [](const LayerKind& kind) { return std::int64_t{kind.window_sized_cache}; })},
  };
  if (softcap != 0) node.attributes["softcap"] = softcap;
}

std::int64_t DecoderSizes::tables() const {
  std::int64_t last = 0;
  for (const LayerKind& layer : layers) last = std::max(last, layer.table);
  return last + 1;
}

// For the model's own sizes, without a device's padding.
std::int64_t DecoderSizes::multiply_adds() const {
  const std::int64_t layer = packed_heads() + heads * head_size + 3 * feed_forward;
  return (layer * layer_count() + vocabulary) * hidden;
}

void check_values_of_decoder(const Node& node, const DecoderSizes& sizes, std::size_t extra) {
  const std::vector<DataType> cache{DataType::kBFloat16, DataType::kFloat16, DataType::kFloat32,
                                    DataType::kInt8};
  std::vector<std::vector<DataType>> inputs{
      {DataType::kFloat32}, {DataType::kInt32}, {DataType::kInt32}};
  std::vector<std::vector<DataType>> outputs{{DataType::kFloat32}};
  for (std::size_t part = 0; part < 2 * sizes.layers.size(); ++part) {
    inputs.push_back(cache);
    outputs.push_back(cache);
  }
  if (sizes.blocks) inputs.push_back({DataType::kInt32});
  const std::size_t given = node.inputs.size() - std::min(extra, node.inputs.size());
  const std::vector<Value> first(node.inputs.begin(),
                                 node.inputs.begin() + static_cast<std::ptrdiff_t>(given));
  check_values(node, "input", first, inputs);
  check_values(node, "output", node.outputs, outputs);
}

}  // namespace flownpu::layers
