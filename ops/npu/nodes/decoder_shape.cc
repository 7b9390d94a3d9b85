// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/nodes/decoder_shape.h"

#include <algorithm>

#include "ops/error.h"
#include "ops/formats/q4nx.h"

namespace flownpu::npu {
namespace {

constexpr std::int64_t kGatedColumns = 64;

// The largest sizes that are read: some ten times those of the largest models there are. All bytes
// that are computed of them are below 2^26 rows / 32 x 2^20 columns / 256 x 5120 < 2^46 a
// projection.
constexpr std::int64_t kMostHeads = 1 << 12;
constexpr std::int64_t kMostHeadSize = 1 << 12;
constexpr std::int64_t kMostHidden = 1 << 20;
constexpr std::int64_t kMostFeedForward = 1 << 20;
constexpr std::int64_t kMostVocabulary = 1 << 24;
constexpr std::int64_t kMostPositions = 1 << 30;
constexpr std::int64_t kMostLayers = 1 << 12;

constexpr std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return q4nx::ceil_div(value, multiple) * multiple;
}

template <typename Get>
std::vector<std::int64_t> list(const std::vector<LayerKind>& layers, const Get& get) {
  std::vector<std::int64_t> values;
  values.reserve(layers.size());
  for (const LayerKind& layer : layers) values.push_back(get(layer));
  return values;
}

}  // namespace

std::size_t Projection::bytes() const {
  const std::int64_t row_blocks = q4nx::row_blocks(rows) * (gated ? 2 : 1);
  return static_cast<std::size_t>(row_blocks * q4nx::kWide.row_bytes(columns));
}

DecoderShape DecoderShape::read(const Node& node) {
  DecoderShape shape;
  shape.hidden = size_attribute(node, "hidden", kMostHidden);
  shape.heads = size_attribute(node, "heads", kMostHeads);
  shape.kv_heads = size_attribute(node, "kv_heads", kMostHeads);
  shape.head_size = size_attribute(node, "head_size", kMostHeadSize);
  shape.feed_forward = size_attribute(node, "feed_forward", kMostFeedForward);
  shape.vocabulary = size_attribute(node, "vocabulary", kMostVocabulary);
  shape.positions = size_attribute(node, "positions", kMostPositions);
  shape.activation = node.text("activation", "");
  shape.post_norms = node.required_integer("post_norms") != 0;
  shape.qk_norm = node.required_integer("qk_norm") != 0;
  shape.blocks = node.required_integer("bidirectional_blocks") != 0;
  shape.epsilon = node.number("epsilon", 0);
  shape.scale = node.number("scale", 0);
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
    shape.layers.push_back({windows[i], tables[i], window_sized[i] != 0});
  }
  return shape;
}

void DecoderShape::write(Node& node) const {
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
      {"bidirectional_blocks", std::int64_t{blocks}},
      {"epsilon", epsilon},
      {"scale", scale},
      {"layers", layer_count()},
      {"windows", list(layers, [](const LayerKind& kind) { return kind.window; })},
      {"tables", list(layers, [](const LayerKind& kind) { return kind.table; })},
      {"sliding_window_cache",
       list(layers, [](const LayerKind& kind) { return std::int64_t{kind.window_sized_cache}; })},
  };
}

std::int64_t DecoderShape::tables() const {
  std::int64_t last = 0;
  for (const LayerKind& layer : layers) last = std::max(last, layer.table);
  return last + 1;
}

std::int64_t DecoderShape::padded_feed_forward() const {
  return round_up(feed_forward, kGatedColumns);
}

std::int64_t DecoderShape::line() const { return round_up(hidden, q4nx::kWide.block_columns()); }

std::array<Projection, 4> DecoderShape::projections() const {
  const std::int64_t attention = heads * head_size;
  return {{
      {.rows = attention + 2 * kv_heads * head_size, .columns = hidden},
      {.rows = hidden, .columns = attention},
      {.rows = padded_feed_forward(), .columns = hidden, .gated = true},
      {.rows = hidden, .columns = padded_feed_forward()},
  }};
}

std::size_t DecoderShape::layer_weight_bytes() const {
  std::size_t bytes = 0;
  for (const Projection& projection : projections()) bytes += projection.bytes();
  return bytes;
}

std::size_t DecoderShape::layer_vector_bytes() const {
  const std::int64_t elements = 2 * entry_norms() * line() + (qk_norm ? 2 * head_size : 0);
  return static_cast<std::size_t>(elements) * kBFloat16Bytes;
}

std::size_t DecoderShape::final_vector_bytes() const {
  return static_cast<std::size_t>(entry_norms() * line()) * kBFloat16Bytes;
}

std::size_t DecoderShape::weight_bytes() const {
  return layers.size() * layer_weight_bytes() + head().bytes();
}

std::size_t DecoderShape::vector_bytes() const {
  return layers.size() * layer_vector_bytes() + final_vector_bytes();
}

std::size_t DecoderShape::rotary_bytes() const {
  return static_cast<std::size_t>(tables() * positions) * angle_bytes();
}

std::size_t DecoderShape::angle_bytes() const {
  return static_cast<std::size_t>(head_size) * kBFloat16Bytes;
}

}  // namespace flownpu::npu
