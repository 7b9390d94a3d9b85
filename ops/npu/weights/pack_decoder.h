// SPDX-License-Identifier: Apache-2.0
// A decoder's constants in the order in which the array reads them (nodes/decoder_shape.h).
#pragma once

#include <vector>

#include "ops/layers/decoder_constants.h"
#include "ops/nodes/node.h"
#include "ops/npu/nodes/decoder_shape.h"

namespace flownpu::npu {

// "weights", "vectors" and "rotary". Norm weights, cosines and sines are rounded to bf16, to
// nearest even. The constants must live as long as the result.
std::vector<Packed> pack(const DecoderShape& shape, const layers::DecoderConstants& constants);

}  // namespace flownpu::npu
