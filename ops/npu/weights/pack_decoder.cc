// SPDX-License-Identifier: Apache-2.0
#include <span>
#include <utility>
#include <vector>

#include "ops/formats/q4nx.h"
#include "ops/npu/nodes/lowered_node.h"
#include "ops/npu/weights/pack.h"
#include "ops/npu/weights/q4nx.h"

namespace flownpu::npu {
namespace {

void write_rows(const layers::Q4NXWeight& weight, PackedWriter& writer) {
  for (std::int64_t i = 0; i < weight.row_blocks(); ++i)
    write_wide_row(weight, i, writer.take(wide_row_bytes(weight)));
}

// Rows of blocks of the gate and of the up projection take turns; those beyond the model's are
// zeros. (A down projection needs no more columns for that: blocks have 256, padded with zeros.)
void write_gate_up(const DecoderShape& shape, const layers::Q4NXWeight& weight,
                   PackedWriter& writer) {
  const std::int64_t rows = q4nx::row_blocks(weight.rows);
  const std::int64_t padded = q4nx::row_blocks(shape.padded_feed_forward());
  for (std::int64_t i = 0; i < rows; ++i) {
    write_wide_row(weight, i, writer.take(wide_row_bytes(weight)));
    write_wide_row(weight, rows + i, writer.take(wide_row_bytes(weight)));
  }
  writer.zeros(2 * static_cast<std::size_t>(padded - rows) * wide_row_bytes(weight));
}

void write_weights(const DecoderShape& shape, const layers::DecoderConstants& constants,
                   PackedWriter writer) {
  for (const layers::LayerConstants& layer : constants.layers) {
    write_rows(layer.qkv, writer);
    write_rows(layer.output, writer);
    write_gate_up(shape, layer.gate_up, writer);
    write_rows(layer.down, writer);
  }
  write_rows(constants.head, writer);
}

void write_vectors(const DecoderShape& shape, const layers::DecoderConstants& constants,
                   PackedWriter writer) {
  for (const layers::LayerConstants& layer : constants.layers) {
    for (const float* norm : layer.norms) writer.line(norm, shape.hidden, shape.line());
    if (!shape.qk_norm) continue;
    for (const float* norm : layer.qk_norm) writer.bfloat16(norm, shape.head_size);
  }
  for (const float* norm : constants.final_norms) writer.line(norm, shape.hidden, shape.line());
}

void write_rotary(const DecoderShape& shape, const layers::DecoderConstants& constants,
                  PackedWriter writer) {
  const std::int64_t half = shape.head_size / 2;
  const std::vector<float> ones(static_cast<std::size_t>(half), 1);
  for (const layers::RotaryTable& table : constants.rotary) {
    const bool turns = table.cosine != nullptr;
    for (std::int64_t position = 0; position < shape.positions; ++position) {
      writer.bfloat16(turns ? table.cosine + position * half : ones.data(), half);
      writer.bfloat16(turns ? table.sine + position * half : nullptr, half);
    }
  }
}

}  // namespace

std::vector<Packed> pack(const DecoderShape& shape, const layers::DecoderConstants& constants) {
  const auto packed = [&](const char* name, std::size_t bytes, auto write) {
    return Packed{name, bytes, [shape, constants, write](std::span<std::byte> memory) {
                    write(shape, constants, PackedWriter(memory));
                  }};
  };
  return {
      packed("weights", shape.weight_bytes(), write_weights),
      packed("vectors", shape.vector_bytes(), write_vectors),
      packed("rotary", shape.rotary_bytes(), write_rotary),
  };
}

}  // namespace flownpu::npu
