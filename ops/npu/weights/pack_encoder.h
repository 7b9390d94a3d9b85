// SPDX-License-Identifier: Apache-2.0
// An encoder's constants in the order in which the array reads them (nodes/encoder_shape.h).
#pragma once

#include <cstdint>
#include <vector>

#include "ops/nodes/node.h"
#include "ops/npu/nodes/encoder_shape.h"
#include "ops/npu/weights/dense.h"

namespace flownpu::npu {

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
  std::vector<DenseConstants> projections;  // four a layer
  DenseConstants projector;
  std::vector<EncoderNorm> norms;
  const float* pooled_norm = nullptr;
};

// "weights" and "vectors", rounded to bf16, to nearest even. The constants must live as long as the
// result.
std::vector<Packed> pack(const EncoderShape& shape, const EncoderConstants& constants);

}  // namespace flownpu::npu
