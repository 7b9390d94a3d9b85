// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/nodes/encoder_shape.h"

#include <algorithm>

#include "ops/formats/q4nx.h"
#include "ops/layers/checked_node.h"
#include "ops/npu/nodes/lowered_node.h"

namespace flownpu::npu {
namespace {

// As python/flownpu/npu/encoder.py has them: a bias is the first row of a group; GEMM takes K in
// multiples of k_mt; a megatile has 512 rows, and at least 256 columns in panels of 32
// (aie/designs/gemm.py: what is predicted to be fastest).
constexpr std::int64_t kBiasGroup = 32;
constexpr std::int64_t kInner = 256;
constexpr std::int64_t kPanel = 32;
constexpr std::int64_t kMegatileRows = 512;
constexpr std::int64_t kMegatileColumns = 256;

// The largest sizes that are read: some ten times those of the largest models there are. Bytes that
// are computed of them are below 2^63: no product has more than 2^27 rows, or 2^22 columns.
constexpr std::int64_t kMostChannels = 1 << 6;
constexpr std::int64_t kMostSide = 1 << 10;
constexpr std::int64_t kMostHeads = 1 << 10;
constexpr std::int64_t kMostHidden = 1 << 18;
constexpr std::int64_t kMostLayers = 1 << 10;

constexpr std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return q4nx::ceil_div(value, multiple) * multiple;
}

}  // namespace

std::int64_t padded_tokens(std::int64_t tokens) { return round_up(tokens, kMegatileRows); }

std::int64_t DenseProjection::bias_row() const { return round_up(inner, kBiasGroup); }

std::int64_t DenseProjection::padded_rows() const { return round_up(rows(), kInner); }

std::int64_t DenseProjection::padded_columns() const {
  return std::max(round_up(columns, kPanel), kMegatileColumns);
}

std::size_t DenseProjection::bytes() const {
  return static_cast<std::size_t>(padded_rows() * padded_columns()) * kBFloat16Bytes;
}

EncoderShape EncoderShape::read(const Node& node) {
  EncoderShape shape;
  shape.channels = layers::size_attribute(node, "channels", kMostChannels);
  shape.patch = layers::size_attribute(node, "patch", kMostSide);
  shape.grid = layers::size_attribute(node, "grid", kMostSide);
  shape.hidden = layers::size_attribute(node, "hidden", kMostHidden);
  shape.heads = layers::size_attribute(node, "heads", kMostHeads);
  shape.head_size = layers::size_attribute(node, "head_size", kMostHeads);
  shape.feed_forward = layers::size_attribute(node, "feed_forward", kMostHidden);
  shape.layers = layers::size_attribute(node, "layers", kMostLayers);
  shape.pooling = layers::size_attribute(node, "pooling", shape.grid);
  shape.features = layers::size_attribute(node, "features", kMostHidden);
  shape.epsilon = node.number("epsilon", 0);
  shape.pooled_epsilon = node.number("pooled_epsilon", 0);
  shape.scale = node.number("scale", 0);
  return shape;
}

void EncoderShape::write(Node& node) const {
  node.attributes = {
      {"channels", channels},
      {"patch", patch},
      {"grid", grid},
      {"hidden", hidden},
      {"heads", heads},
      {"head_size", head_size},
      {"feed_forward", feed_forward},
      {"layers", layers},
      {"pooling", pooling},
      {"features", features},
      {"epsilon", epsilon},
      {"pooled_epsilon", pooled_epsilon},
      {"scale", scale},
  };
}

DenseProjection EncoderShape::embedding() const {
  return {.inner = channels * patch * patch, .columns = hidden};
}

std::array<DenseProjection, 4> EncoderShape::projections() const {
  const std::int64_t attention = heads * head_size;
  return {{
      {.inner = hidden, .columns = 3 * attention},
      {.inner = attention, .columns = hidden},
      {.inner = hidden, .columns = feed_forward, .has_gelu = true},
      {.inner = feed_forward, .columns = hidden},
  }};
}

DenseProjection EncoderShape::projector() const {
  return {.inner = hidden, .columns = features, .has_bias = false};
}

std::size_t EncoderShape::layer_weight_bytes() const {
  std::size_t bytes = 0;
  for (const DenseProjection& projection : projections()) bytes += projection.bytes();
  return bytes;
}

std::size_t EncoderShape::weight_bytes() const {
  return embedding().bytes() + static_cast<std::size_t>(layers) * layer_weight_bytes() +
         projector().bytes();
}

std::int64_t EncoderShape::vector_elements() const {
  return (patches() + 2 * norms() + 1) * hidden;
}

std::size_t EncoderShape::vector_bytes() const {
  return static_cast<std::size_t>(vector_elements()) * kBFloat16Bytes;
}

}  // namespace flownpu::npu
