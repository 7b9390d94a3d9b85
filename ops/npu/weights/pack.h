// SPDX-License-Identifier: Apache-2.0
// Constants in the order in which the array reads them (nodes/decoder_shape.h,
// nodes/encoder_shape.h). What is rounded to bf16 is rounded to nearest even. The constants must
// live as long as what is packed of them.
#pragma once

#include <vector>

#include "ops/layers/decoder_constants.h"
#include "ops/nodes/node.h"
#include "ops/npu/nodes/decoder_shape.h"
#include "ops/npu/nodes/encoder_shape.h"
#include "ops/npu/weights/dense.h"

namespace flownpu::npu {

// A decoder's "weights", "vectors" and "rotary".
std::vector<Packed> pack(const DecoderShape& shape, const layers::DecoderConstants& constants);

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

// An encoder's "weights" and "vectors".
std::vector<Packed> pack(const EncoderShape& shape, const EncoderConstants& constants);

}  // namespace flownpu::npu
