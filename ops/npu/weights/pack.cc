// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/weights/pack.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

#include "ops/formats/q4nx_layouts.h"
#include "ops/npu/nodes/lowered_node.h"

namespace flownpu::npu {

std::size_t wide_row_bytes(const transformer::Q4NXWeight& weight) {
  return static_cast<std::size_t>(q4nx::kWide.row_bytes(weight.columns));
}

void write_wide_row(const transformer::Q4NXWeight& weight, std::int64_t number,
                    std::span<std::byte> wide) {
  const q4nx::Layout& layout = weight.layout;
  const std::byte* row = weight.blocks + number * layout.row_bytes(weight.columns);
  if (layout == q4nx::kWide) {
    std::memcpy(wide.data(), row, wide.size());
    return;
  }
  const std::int64_t first = number % q4nx::row_blocks(weight.rows) * q4nx::kBlockRows;
  const std::int64_t rows = std::min(q4nx::kBlockRows, weight.rows - first);
  q4nx::convert_row(row, layout, wide.data(), q4nx::kWide, weight.columns, rows);
}

namespace {

template <typename Shape, typename Constants>
Packed packed(const char* name, std::size_t bytes, const Shape& shape, const Constants& constants,
              void (*write)(const Shape&, const Constants&, PackedWriter)) {
  return {name, bytes, [shape, constants, write](std::span<std::byte> memory) {
            write(shape, constants, PackedWriter(memory));
          }};
}

// --- A decoder's constants

void write_rows(const transformer::Q4NXWeight& weight, PackedWriter& writer) {
  for (std::int64_t i = 0; i < weight.row_blocks(); ++i)
    write_wide_row(weight, i, writer.take(wide_row_bytes(weight)));
}

// A bias is packed as the minimum of a group of columns whose scales are 0 (aie/designs/bias.py).
// `columns`: those of the weight, or one more. A null bias is zeros.
void write_biased(const transformer::Q4NXWeight& weight, const float* bias, std::int64_t columns,
                  PackedWriter& writer) {
  if (columns == weight.columns) {
    write_rows(weight, writer);
    return;
  }
  const std::size_t given = wide_row_bytes(weight);
  const std::int64_t group = weight.columns / q4nx::kGroup;
  const auto minima =
      static_cast<std::size_t>(q4nx::kWide.scales_at(group) + q4nx::kWide.minimum_offset());
  for (std::int64_t i = 0; i < weight.row_blocks(); ++i) {
    const std::span<std::byte> wide =
        writer.take(static_cast<std::size_t>(q4nx::kWide.row_bytes(columns)));
    write_wide_row(weight, i, wide.first(given));
    std::ranges::fill(wide.subspan(given), std::byte{0});
    if (bias == nullptr) continue;
    PackedWriter(wide.subspan(minima)).bfloat16(bias + i * q4nx::kBlockRows, q4nx::kBlockRows);
  }
}

// Rows of blocks of the gate alternate with those of the up projection. Rows beyond the model's are
// zeros. (A down projection needs no padding for the columns that this adds: blocks have 256
// columns, padded with zeros.)
void write_gate_up(const DecoderShape& shape, const transformer::Q4NXWeight& weight,
                   PackedWriter& writer) {
  const std::int64_t rows = q4nx::row_blocks(weight.rows);
  const std::int64_t padded = q4nx::row_blocks(shape.padded_feed_forward());
  for (std::int64_t i = 0; i < rows; ++i) {
    write_wide_row(weight, i, writer.take(wide_row_bytes(weight)));
    write_wide_row(weight, rows + i, writer.take(wide_row_bytes(weight)));
  }
  writer.zeros(2 * static_cast<std::size_t>(padded - rows) * wide_row_bytes(weight));
}

void write_weights(const DecoderShape& shape, const transformer::DecoderConstants& constants,
                   PackedWriter writer) {
  for (const transformer::LayerConstants& layer : constants.layers) {
    write_biased(layer.qkv, layer.qkv_bias, shape.qkv_columns(), writer);
    write_biased(layer.output, layer.output_bias, shape.output_columns(), writer);
    write_gate_up(shape, layer.gate_up, writer);
    write_rows(layer.down, writer);
  }
  write_rows(constants.head, writer);
}

void write_vectors(const DecoderShape& shape, const transformer::DecoderConstants& constants,
                   PackedWriter writer) {
  for (const transformer::LayerConstants& layer : constants.layers) {
    for (const float* norm : layer.norms) writer.line(norm, shape.hidden, shape.line());
    for (std::size_t i = 0; i < layer.qk_norm.size(); ++i)
      writer.bfloat16(layer.qk_norm.at(i), shape.qk_norm_sizes().at(i));
  }
  for (const float* norm : constants.final_norms) writer.line(norm, shape.hidden, shape.line());
}

void write_rotary(const DecoderShape& shape, const transformer::DecoderConstants& constants,
                  PackedWriter writer) {
  const std::int64_t half = shape.attention().head_size / 2;
  const std::vector<float> ones(static_cast<std::size_t>(half), 1);
  for (const transformer::RotaryTable& table : constants.rotary) {
    const bool turns = table.cosine != nullptr;
    for (std::int64_t position = 0; position < shape.positions; ++position) {
      writer.bfloat16(turns ? table.cosine + position * half : ones.data(), half);
      writer.bfloat16(turns ? table.sine + position * half : nullptr, half);
    }
  }
}

// --- An encoder's constants

void write_projection(const DenseProjection& projection, const DenseConstants& constants,
                      PackedWriter& writer) {
  const std::span<std::byte> panels = writer.take(projection.bytes());
  write_panels(constants.weight, projection.padded_rows(), panels);
  if (constants.bias != nullptr) {
    write_panel_row({constants.bias, static_cast<std::size_t>(projection.columns)},
                    projection.bias_row(), projection.padded_rows(), panels);
  }
}

void write_weights(const EncoderShape& shape, const EncoderConstants& constants,
                   PackedWriter writer) {
  write_projection(shape.embedding(), constants.embedding, writer);
  for (std::size_t i = 0; i < constants.projections.size(); ++i)
    write_projection(shape.projections().at(i % 4), constants.projections[i], writer);
  write_projection(shape.projector(), constants.projector, writer);
}

void write_vectors(const EncoderShape& shape, const EncoderConstants& constants,
                   PackedWriter writer) {
  writer.bfloat16(constants.positions, shape.patches() * shape.hidden);
  for (const EncoderNorm& norm : constants.norms) {
    writer.bfloat16(norm.weight, shape.hidden);
    writer.bfloat16(norm.bias, shape.hidden);
  }
  writer.bfloat16(constants.pooled_norm, shape.hidden);
}

}  // namespace

std::vector<Packed> pack(const DecoderShape& shape,
                         const transformer::DecoderConstants& constants) {
  return {packed("weights", shape.weight_bytes(), shape, constants, write_weights),
          packed("vectors", shape.vector_bytes(), shape, constants, write_vectors),
          packed("rotary", shape.rotary_bytes(), shape, constants, write_rotary)};
}

std::vector<Packed> pack(const EncoderShape& shape, const EncoderConstants& constants) {
  return {packed("weights", shape.weight_bytes(), shape, constants, write_weights),
          packed("vectors", shape.vector_bytes(), shape, constants, write_vectors)};
}

}  // namespace flownpu::npu
