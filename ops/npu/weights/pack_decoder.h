// SPDX-License-Identifier: Apache-2.0
// A decoder's constants in the order in which the array reads them (nodes/decoder_shape.h).
#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include "ops/nodes/node.h"
#include "ops/npu/nodes/decoder_shape.h"
#include "ops/npu/weights/q4nx.h"

namespace flownpu::npu {

// Where the model has the constants of a layer: Q4NX weights, and f32 vectors, of which null stands
// for zeros.
struct LayerConstants {
  Q4NXWeight qkv;
  Q4NXWeight output;
  Q4NXWeight gate_up;
  Q4NXWeight down;
  // Weights of the norms at both entries of the residual stream, entry_norms() each, [D].
  std::vector<const float*> norms;
  // Weights of the norms of queries and keys, [d].
  std::array<const float*, 2> qk_norm{};
};

struct RotaryTable {
  const float* cosine = nullptr;  // [positions, d/2]
  const float* sine = nullptr;
};

struct DecoderConstants {
  std::vector<LayerConstants> layers;
  std::vector<const float*> final_norms;  // entry_norms()
  Q4NXWeight head;
  std::vector<RotaryTable> rotary;
};

// "weights", "vectors" and "rotary". Norm weights, cosines and sines are rounded to bf16, to
// nearest even. The constants must live as long as the result.
std::vector<Packed> pack(const DecoderShape& shape, const DecoderConstants& constants);

}  // namespace flownpu::npu
