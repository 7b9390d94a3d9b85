// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/nodes/encoder_shape.h"

#include <algorithm>
#include <utility>

#include "ops/layers/checked_node.h"
#include "ops/npu/nodes/lowered_node.h"

namespace flownpu::npu {
namespace {

// As in aie/programs/encoder_shape.py: a bias is the first row of a group; GEMM takes K in
// multiples of k_mt; a megatile has at least 256 columns in panels of 32 (aie/designs/gemm.py: what
// is predicted to be fastest).
constexpr std::int64_t kBiasGroup = 32;
constexpr std::int64_t kInner = 256;
constexpr std::int64_t kPanel = 32;
constexpr std::int64_t kMegatileColumns = 256;

// The sizes, and the largest value of each that is accepted: some ten times that of the largest
// models there are. With these limits counts of bytes stay below 2^63: no product has more than
// 2^27 rows, or 2^22 columns.
struct Size {
  const char* name;
  std::int64_t EncoderShape::* value;
  std::int64_t most;
};
constexpr Size kSizes[] = {
    {"channels", &EncoderShape::channels, 1 << 6},
    {"patch", &EncoderShape::patch, 1 << 10},
    {"grid", &EncoderShape::grid, 1 << 10},
    {"hidden", &EncoderShape::hidden, 1 << 18},
    {"heads", &EncoderShape::heads, 1 << 10},
    {"head_size", &EncoderShape::head_size, 1 << 10},
    {"feed_forward", &EncoderShape::feed_forward, 1 << 18},
    {"layers", &EncoderShape::layers, 1 << 10},
    {"pooling", &EncoderShape::pooling, 1 << 10},
    {"features", &EncoderShape::features, 1 << 18},
};
constexpr std::pair<const char*, float EncoderShape::*> kNumbers[] = {
    {"epsilon", &EncoderShape::epsilon},
    {"pooled_epsilon", &EncoderShape::pooled_epsilon},
    {"scale", &EncoderShape::scale},
};

}  // namespace

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
  for (const auto& [name, value, most] : kSizes)
    shape.*value = layers::size_attribute(node, name, most);
  layers::size_attribute(node, "pooling", shape.grid);
  for (const auto& [name, value] : kNumbers) shape.*value = node.number(name, 0);
  return shape;
}

void EncoderShape::write(Node& node) const {
  for (const auto& [name, value, _] : kSizes) node.attributes[name] = this->*value;
  for (const auto& [name, value] : kNumbers) node.attributes[name] = this->*value;
}

DenseProjection EncoderShape::embedding() const {
  return {.inner = channels * patch * patch, .columns = hidden};
}

std::array<DenseProjection, 4> EncoderShape::projections() const {
  const std::int64_t attention = heads * head_size;
  return {{
      {.inner = hidden, .columns = 3 * attention},
      {.inner = attention, .columns = hidden},
      {.inner = hidden, .columns = feed_forward},
      {.inner = feed_forward, .columns = hidden},
  }};
}

DenseProjection EncoderShape::projector() const {
  return {.inner = hidden, .columns = features, .has_bias = false};
}

std::size_t EncoderShape::weight_bytes() const {
  std::size_t layer = 0;
  for (const DenseProjection& projection : projections()) layer += projection.bytes();
  return embedding().bytes() + static_cast<std::size_t>(layers) * layer + projector().bytes();
}

std::size_t EncoderShape::vector_bytes() const {
  return static_cast<std::size_t>((patches() + 2 * norms() + 1) * hidden) * kBFloat16Bytes;
}

}  // namespace flownpu::npu
