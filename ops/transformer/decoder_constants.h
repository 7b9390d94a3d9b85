// SPDX-License-Identifier: Apache-2.0
// Pointers to the constants of a decoder in its model.
#pragma once

#include <array>
#include <vector>

#include "ops/transformer/q4nx_weight.h"

namespace flownpu::transformer {

// The constants of a layer: Q4NX weights, and f32 vectors, where null stands for zeros.
struct LayerConstants {
  Q4NXWeight qkv;
  const float* qkv_bias = nullptr;  // [(H + 2 G) d]
  Q4NXWeight output;
  Q4NXWeight gate_up;
  Q4NXWeight down;
  // Weights [D] of the norms at the layer's two entries to the residual stream (before attention
  // and before the feed-forward), entry_norms() for each.
  std::vector<const float*> norms;
  // Weights of the norms of queries and keys, [d].
  std::array<const float*, 2> qk_norm{};
};

// Both are null for layers without RoPE, which is the same as cosines of 1 and sines of 0.
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

}  // namespace flownpu::transformer
