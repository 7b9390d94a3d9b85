// SPDX-License-Identifier: Apache-2.0
#include <span>

#include "ops/npu/nodes/lowered_node.h"
#include "ops/npu/weights/pack.h"

namespace flownpu::npu {
namespace {

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

std::vector<Packed> pack(const EncoderShape& shape, const EncoderConstants& constants) {
  const auto packed = [&](const char* name, std::size_t bytes, auto write) {
    return Packed{name, bytes, [shape, constants, write](std::span<std::byte> memory) {
                    write(shape, constants, PackedWriter(memory));
                  }};
  };
  return {packed("weights", shape.weight_bytes(), write_weights),
          packed("vectors", shape.vector_bytes(), write_vectors)};
}

}  // namespace flownpu::npu
