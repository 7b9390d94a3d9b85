// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/pack_encoder.h"

#include <cstring>
#include <span>

#include "ops/npu/lowered_node.h"
#include "ops/number_formats.h"

namespace flownpu::npu {
namespace {

// panels(K, N): [N/32][K/8][4][8 of K][8 of N].
constexpr std::int64_t kSide = 8;
constexpr std::int64_t kPanelColumns = 32;

// A row of a weight to its places in the panels of `rows` rows.
void write_row(std::span<const float> row, std::int64_t k, std::int64_t rows,
               std::span<std::byte> panels) {
  for (std::int64_t n = 0; n < static_cast<std::int64_t>(row.size()); ++n) {
    const std::int64_t slab = (n / kPanelColumns * rows + k / kSide * kSide) * kPanelColumns;
    const std::int64_t sub_tile = n % kPanelColumns / kSide * kSide * kSide;
    const std::int64_t place = slab + sub_tile + k % kSide * kSide + n % kSide;
    const std::uint16_t bits = to_bfloat16(row[static_cast<std::size_t>(n)]);
    std::memcpy(panels.data() + static_cast<std::size_t>(place) * kBFloat16Bytes, &bits,
                kBFloat16Bytes);
  }
}

void write_projection(const DenseProjection& projection, const DenseConstants& constants,
                      PackedWriter& writer) {
  const std::span<std::byte> panels = writer.take(projection.bytes());
  std::memset(panels.data(), 0, panels.size());
  std::vector<float> row(static_cast<std::size_t>(projection.columns));
  for (std::int64_t k = 0; k < projection.inner; ++k) {
    constants.weight.read_row(k, row);
    write_row(row, k, projection.padded_rows(), panels);
  }
  if (constants.bias != nullptr)
    write_row({constants.bias, row.size()}, projection.bias_row(), projection.padded_rows(),
              panels);
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
