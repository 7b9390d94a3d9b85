// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/nodes/decoder_shape.h"

#include "ops/formats/q4nx.h"
#include "ops/npu/nodes/planes.h"
#include "ops/npu/nodes/sinks.h"

namespace flownpu::npu {
namespace {

constexpr std::int64_t kGatedColumns = 64;

}  // namespace

std::size_t Projection::bytes() const {
  const std::int64_t row_blocks = q4nx::row_blocks(rows) * (gated ? 2 : 1);
  return static_cast<std::size_t>(row_blocks *
                                  q4nx::kWide.row_bytes(wide_columns(columns, eight_bits)));
}

std::int64_t DecoderShape::padded_feed_forward() const {
  return round_up(feed_forward().size, kGatedColumns);
}

std::int64_t DecoderShape::qkv_columns() const {
  return attention().qkv_bias ? hidden + 1 : hidden;
}

std::int64_t DecoderShape::biased_columns(const transformer::Layer& layer) const {
  const bool biased = layer.has_attention() && layer.attention().output_bias;
  return output_columns(layer) + (biased ? 1 : 0);
}

std::int64_t DecoderShape::line() const {
  return round_up(qkv_columns(), q4nx::kWide.block_columns());
}

std::array<Projection, 4> DecoderShape::projections(const transformer::Layer& layer) const {
  using transformer::ProjectionKind;
  return {{
      {.rows = input_rows(layer),
       .columns = layer.has_attention() ? qkv_columns() : hidden,
       .eight_bits = layer.has_eight_bits(ProjectionKind::kQkv)},
      {.rows = hidden,
       .columns = biased_columns(layer),
       .eight_bits = layer.has_eight_bits(ProjectionKind::kOutput)},
      {.rows = padded_feed_forward(),
       .columns = hidden,
       .gated = true,
       .eight_bits = layer.has_eight_bits(ProjectionKind::kGateUp)},
      {.rows = hidden,
       .columns = padded_feed_forward(),
       .eight_bits = layer.has_eight_bits(ProjectionKind::kDown)},
  }};
}

std::size_t DecoderShape::weight_bytes() const {
  std::size_t bytes = head().bytes();
  for (const transformer::Layer& layer : layers) {
    const auto [qkv, output, gate_up, down] = projections(layer);
    bytes += qkv.bytes() + output.bytes();
    if (feed_forward().experts == 0) bytes += gate_up.bytes() + down.bytes();
  }
  return bytes;
}

std::size_t DecoderShape::expert_bytes(const transformer::Layer& layer) const {
  const auto [qkv, output, gate_up, down] = projections(layer);
  return gate_up.bytes() + down.bytes();
}

std::size_t DecoderShape::expert_bytes() const {
  std::size_t bytes = 0;
  for (const transformer::Layer& layer : layers)
    bytes += static_cast<std::size_t>(feed_forward().experts) * expert_bytes(layer);
  return bytes;
}

std::size_t DecoderShape::vector_bytes() const {
  const std::int64_t norms = entry_norms() * line();
  const auto [of_queries, of_keys] = qk_norm_sizes();
  const std::int64_t sinks =
      attention().sinks ? sink_elements(attention().kv_heads, attention().head_size) : 0;
  // A layer that keeps a state has these places, too, unused.
  const std::int64_t layer = 2 * norms + sinks + of_queries + of_keys;
  return static_cast<std::size_t>(layer_count() * layer + norms) * kBFloat16Bytes;
}

std::size_t DecoderShape::rotary_bytes() const {
  return given_tables ? 0 : static_cast<std::size_t>(tables() * positions) * angle_bytes();
}

std::vector<std::int64_t> DecoderShape::head_order() const {
  const std::int64_t half = attention().head_size / 2;
  const std::int64_t turned = rotated_size / 2;
  std::vector<std::int64_t> order;
  for (std::int64_t side = 0; side < 2; ++side) {
    for (std::int64_t i = 0; i < half; ++i)
      order.push_back(i + (i < turned ? side * turned : side == 0 ? turned : half));
  }
  return order;
}

std::size_t DecoderShape::angle_bytes() const {
  return static_cast<std::size_t>(attention().head_size) * kBFloat16Bytes;
}

}  // namespace flownpu::npu
