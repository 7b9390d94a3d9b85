// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/encoder_shape.h"

#include <algorithm>

#include "ops/npu/lowered_node.h"
#include "ops/q4nx.h"

namespace flownpu::npu {
namespace {

// As python/flownpu/npu_encoder.py has them: a bias is the first row of a group; GEMM takes K in
// multiples of k_mt; a megatile has 512 rows, and at least 256 columns in panels of 32
// (aie/designs/gemm.py: what is predicted to be fastest).
constexpr std::int64_t kBiasGroup = 32;
constexpr std::int64_t kInner = 256;
constexpr std::int64_t kPanel = 32;
constexpr std::int64_t kMegatileRows = 512;
constexpr std::int64_t kMegatileColumns = 256;

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
  shape.channels = node.required_integer("channels");
  shape.patch = node.required_integer("patch");
  shape.grid = node.required_integer("grid");
  shape.hidden = node.required_integer("hidden");
  shape.heads = node.required_integer("heads");
  shape.head_size = node.required_integer("head_size");
  shape.feed_forward = node.required_integer("feed_forward");
  shape.layers = node.required_integer("layers");
  shape.pooling = node.required_integer("pooling");
  shape.features = node.required_integer("features");
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

}  // namespace flownpu::npu
