// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/nodes/encoder_shape.h"

#include <algorithm>

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
  const EncoderShape shape = transformer::read_fields<EncoderShape>(node, "", 1).front();
  transformer::integer_at(node, "pooling", 0, 1, 1, shape.grid);
  return shape;
}

void EncoderShape::write(Node& node) const {
  transformer::write_fields(node, "", std::vector{*this});
}

DenseProjection EncoderShape::embedding() const {
  return {.inner = channels * patch * patch, .columns = hidden};
}

std::array<DenseProjection, 4> EncoderShape::projections() const {
  const std::int64_t attention = heads * head_size;
  return {{
      {.inner = hidden, .columns = 3 * attention},
      {.inner = attention, .columns = hidden},
      {.inner = hidden, .columns = feed_forward, .gelu = true},
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
