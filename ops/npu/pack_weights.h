// SPDX-License-Identifier: Apache-2.0
// A decoder's constants in the order in which the array reads them (decoder_shape.h).
#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include "ops/node.h"
#include "ops/npu/decoder_shape.h"

namespace flownpu::npu {

// Where the model has the constants of a layer: Q4NX blocks as in the file (ops/q4nx.h; the gate's
// rows of blocks, then the up projection's), and f32 vectors, of which null stands for zeros.
struct LayerConstants {
  const std::byte* qkv = nullptr;
  const std::byte* output = nullptr;
  const std::byte* gate_up = nullptr;
  const std::byte* down = nullptr;
  // Of both entries, entry_norms() each, [D].
  std::vector<const float*> norms;
  // Of queries and keys, [d].
  std::array<const float*, 2> qk_norm{};
};

struct RotaryTable {
  const float* cosine = nullptr;  // [positions, d/2]
  const float* sine = nullptr;
};

struct DecoderConstants {
  std::vector<LayerConstants> layers;
  std::vector<const float*> final_norms;  // entry_norms()
  const std::byte* head = nullptr;
  std::vector<RotaryTable> rotary;
};

// "weights", "vectors" and "rotary". Norm weights, cosines and sines are rounded to bf16, to
// nearest even. The constants must live as long as the result.
std::vector<Packed> pack(const DecoderShape& shape, const DecoderConstants& constants);

}  // namespace flownpu::npu
