// SPDX-License-Identifier: Apache-2.0
// Packs constants in the order in which the array reads them (nodes/decoder_shape.h,
// nodes/encoder_shape.h). Numbers are rounded to bf16 to the nearest, ties to even. Packed data is
// written later, so the constants must live until then.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "ops/nodes/node.h"
#include "ops/npu/nodes/decoder_shape.h"
#include "ops/npu/nodes/encoder_shape.h"
#include "ops/npu/weights/dense.h"
#include "ops/transformer/decoder_constants.h"

namespace flownpu::npu {

// Bytes of a row of blocks of a Q4NX weight in the wide layout, which the array reads; of 8 bits,
// in two planes (nodes/planes.h).
std::size_t wide_row_bytes(const transformer::Q4NXWeight& weight);
// Writes row of blocks `number` in wide blocks: the bytes that packing the same codes, scales and
// minima in wide blocks, or those of the planes, would give. `wide`: wide_row_bytes(weight) bytes.
void write_wide_row(const transformer::Q4NXWeight& weight, std::int64_t number,
                    std::span<std::byte> wide);

// Writes a position of a rotary table: d/2 cosines and d/2 sines, of which `turned` are given and
// the others of angles of 0.
void write_angles(const float* cosines, const float* sines, std::int64_t turned, std::int64_t half,
                  PackedWriter& writer);

// Packs a decoder's "weights", "vectors" and "rotary", and "experts" if it has any.
std::vector<Packed> pack(const DecoderShape& shape, const transformer::DecoderConstants& constants);

struct DenseConstants {
  DenseWeight weight;
  const float* bias = nullptr;  // null: zeros
};

struct EncoderNorm {
  const float* weight = nullptr;
  const float* bias = nullptr;
};

struct EncoderConstants {
  DenseConstants embedding;
  const float* positions = nullptr;         // [patches, D]
  std::vector<DenseConstants> projections;  // four in each layer
  DenseConstants projector;
  std::vector<EncoderNorm> norms;
  const float* pooled_norm = nullptr;
};

// Packs an encoder's "weights" and "vectors".
std::vector<Packed> pack(const EncoderShape& shape, const EncoderConstants& constants);

}  // namespace flownpu::npu
