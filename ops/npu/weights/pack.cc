// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/weights/pack.h"

#include <algorithm>
#include <cstring>
#include <ranges>
#include <span>
#include <utility>
#include <vector>

#include "ops/formats/q4nx_layouts.h"
#include "ops/npu/nodes/lowered_node.h"
#include "ops/npu/nodes/planes.h"
#include "ops/npu/nodes/sinks.h"

namespace flownpu::npu {

namespace {

// The number of columns in wide blocks.
std::int64_t columns_of(const transformer::Q4NXWeight& weight) {
  return wide_columns(weight.columns, weight.eight_bits());
}

}  // namespace

std::size_t wide_row_bytes(const transformer::Q4NXWeight& weight) {
  return static_cast<std::size_t>(q4nx::kWide.row_bytes(columns_of(weight)));
}

void write_wide_row(const transformer::Q4NXWeight& weight, std::int64_t number,
                    std::span<std::byte> wide) {
  const q4nx::Layout& layout = weight.layout;
  const std::byte* row = weight.blocks + number * layout.row_bytes(weight.columns);
  if (weight.eight_bits()) {
    write_planes(row, layout, weight.columns, wide.data());
  } else if (layout == q4nx::kWide) {
    std::memcpy(wide.data(), row, wide.size());
  } else {
    const std::int64_t first = number % q4nx::row_blocks(weight.rows) * q4nx::kBlockRows;
    const std::int64_t rows = std::min(q4nx::kBlockRows, weight.rows - first);
    q4nx::convert_row(row, layout, wide.data(), q4nx::kWide, weight.columns, rows);
  }
  if (weight.factor != 1)
    q4nx::multiply_row(wide.data(), q4nx::kWide, columns_of(weight), weight.factor);
}

void write_angles(const float* cosines, const float* sines, std::int64_t turned, std::int64_t half,
                  PackedWriter& writer) {
  writer.bfloat16(cosines, turned);
  constexpr float kOne = 1;
  for (std::int64_t i = turned; i < half; ++i) writer.bfloat16(&kOne, 1);
  writer.line(sines, turned, half);
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

// Writes what the rows of a QKV weight's blocks `number` are in the array's order of heads.
void write_ordered_row(const DecoderShape& shape, const transformer::Q4NXWeight& qkv,
                       std::int64_t number, std::span<std::byte> wide) {
  write_wide_row(qkv, number, wide);
  const std::int64_t turned =
      (shape.attention().heads + shape.attention().kv_heads) * shape.attention().head_size;
  const std::int64_t first = number * q4nx::kBlockRows;
  if (!shape.partly_rotated() || first >= turned) return;
  const std::vector<std::int64_t> order = shape.head_order();
  const auto size = static_cast<std::int64_t>(order.size());
  std::vector<std::byte> source(wide.size());
  std::int64_t read = -1;
  for (const std::int64_t block : std::views::iota(std::int64_t{0}, size / q4nx::kBlockRows)) {
    const std::int64_t of_head = first / size * size / q4nx::kBlockRows + block;
    for (std::int64_t row = 0; row < q4nx::kBlockRows; ++row) {
      const std::int64_t from = order[static_cast<std::size_t>((first + row) % size)];
      if (from / q4nx::kBlockRows != block) continue;
      if (std::exchange(read, of_head) != of_head) write_wide_row(qkv, of_head, source);
      q4nx::copy_matrix_row(source.data(), from % q4nx::kBlockRows, wide.data(), row, q4nx::kWide,
                            columns_of(qkv));
    }
  }
}

// `count` numbers of heads of queries or keys, in the array's order of heads.
std::vector<float> in_head_order(const DecoderShape& shape, const float* numbers,
                                 std::int64_t count) {
  std::vector<float> ordered(numbers, numbers + count);
  if (!shape.partly_rotated()) return ordered;
  const std::vector<std::int64_t> order = shape.head_order();
  for (std::size_t i = 0; i < ordered.size(); ++i)
    ordered[i] = numbers[i - i % order.size() + static_cast<std::size_t>(order[i % order.size()])];
  return ordered;
}

// Rows of blocks of a weight of `columns` columns, those of the model's or one more, by
// write_row(number, wide). A bias is packed as the minimum of a group of columns whose scales are 0
// (aie/designs/bias.py); a null bias is zeros.
template <typename WriteRow>
void write_biased(const transformer::Q4NXWeight& weight, const float* bias, std::int64_t columns,
                  PackedWriter& writer, const WriteRow& write_row) {
  const std::size_t given = wide_row_bytes(weight);
  const std::int64_t group = wide_group(weight.columns / q4nx::kGroup, weight.eight_bits());
  const auto minima =
      static_cast<std::size_t>(q4nx::kWide.scales_at(group) + q4nx::kWide.minimum_offset());
  for (std::int64_t i = 0; i < weight.row_blocks(); ++i) {
    const std::span<std::byte> wide = writer.take(static_cast<std::size_t>(
        q4nx::kWide.row_bytes(wide_columns(columns, weight.eight_bits()))));
    write_row(i, wide.first(given));
    std::ranges::fill(wide.subspan(given), std::byte{0});
    if (bias == nullptr || columns == weight.columns) continue;
    PackedWriter(wide.subspan(minima)).bfloat16(bias + i * q4nx::kBlockRows, q4nx::kBlockRows);
  }
}

void write_qkv(const DecoderShape& shape, const transformer::LayerConstants& layer,
               PackedWriter& writer) {
  const std::int64_t turned =
      shape.packed_heads() - shape.attention().kv_heads * shape.attention().head_size;
  std::vector<float> bias;
  if (layer.qkv_bias != nullptr) {
    bias = in_head_order(shape, layer.qkv_bias, turned);
    bias.insert(bias.end(), layer.qkv_bias + turned, layer.qkv_bias + shape.packed_heads());
  }
  write_biased(layer.qkv, bias.empty() ? nullptr : bias.data(), shape.qkv_columns(), writer,
               [&](std::int64_t number, std::span<std::byte> wide) {
                 write_ordered_row(shape, layer.qkv, number, wide);
               });
}

void write_output(std::int64_t columns, const transformer::LayerConstants& layer,
                  PackedWriter& writer) {
  write_biased(layer.output, layer.output_bias, columns, writer,
               [&](std::int64_t number, std::span<std::byte> wide) {
                 write_wide_row(layer.output, number, wide);
               });
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
  for (std::size_t i = 0; i < constants.layers.size(); ++i) {
    const transformer::LayerConstants& layer = constants.layers[i];
    if (shape.layers[i].has_attention())
      write_qkv(shape, layer, writer);
    else
      write_rows(layer.qkv, writer);
    if (layer.gates) write_rows(*layer.gates, writer);
    write_output(shape.biased_columns(shape.layers[i]), layer, writer);
    if (shape.feed_forward().experts > 0) continue;
    write_gate_up(shape, layer.gate_up, writer);
    write_rows(layer.down, writer);
  }
  write_rows(constants.head, writer);
}

void write_experts(const DecoderShape& shape, const transformer::DecoderConstants& constants,
                   PackedWriter writer) {
  for (const transformer::LayerConstants& layer : constants.layers) {
    for (std::int64_t expert = 0; expert < shape.feed_forward().experts; ++expert) {
      write_gate_up(shape, layer.gate_up.following(expert), writer);
      write_rows(layer.down.following(expert), writer);
    }
  }
}

void write_vectors(const DecoderShape& shape, const transformer::DecoderConstants& constants,
                   PackedWriter writer) {
  for (std::size_t number = 0; number < constants.layers.size(); ++number) {
    const transformer::LayerConstants& layer = constants.layers[number];
    for (const float* norm : layer.norms) writer.line(norm, shape.hidden, shape.line());
    if (const transformer::Attention& attention = shape.attention(); attention.sinks) {
      write_sinks({layer.sinks, static_cast<std::size_t>(attention.heads)}, attention.kv_heads,
                  attention.head_size, writer);
    }
    for (std::size_t i = 0; i < layer.qk_norm.size(); ++i) {
      const std::int64_t size = shape.qk_norm_sizes().at(i);
      if (size != 0 && !shape.layers[number].has_attention())
        writer.line(nullptr, size, size);
      else if (size != 0)
        writer.bfloat16(in_head_order(shape, layer.qk_norm.at(i), size).data(), size);
    }
  }
  for (const float* norm : constants.final_norms) writer.line(norm, shape.hidden, shape.line());
}

void write_rotary(const DecoderShape& shape, const transformer::DecoderConstants& constants,
                  PackedWriter writer) {
  const std::int64_t half = shape.attention().head_size / 2;
  if (shape.given_tables) return;
  for (const transformer::RotaryTable& table : constants.rotary) {
    // The elements that do not turn have angles of 0.
    const std::int64_t turned = table.cosine == nullptr  ? 0
                                : shape.partly_rotated() ? shape.rotated_size / 2
                                                         : half;
    for (std::int64_t position = 0; position < shape.positions; ++position)
      write_angles(table.cosine + position * turned, table.sine + position * turned, turned, half,
                   writer);
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
  std::vector<Packed> all{packed("weights", shape.weight_bytes(), shape, constants, write_weights),
                          packed("vectors", shape.vector_bytes(), shape, constants, write_vectors),
                          packed("rotary", shape.rotary_bytes(), shape, constants, write_rotary)};
  if (shape.feed_forward().experts > 0)
    all.push_back(packed("experts", shape.expert_bytes(), shape, constants, write_experts));
  return all;
}

std::vector<Packed> pack(const EncoderShape& shape, const EncoderConstants& constants) {
  return {packed("weights", shape.weight_bytes(), shape, constants, write_weights),
          packed("vectors", shape.vector_bytes(), shape, constants, write_vectors)};
}

}  // namespace flownpu::npu
