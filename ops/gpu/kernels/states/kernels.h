// SPDX-License-Identifier: Apache-2.0
// Kernels of layers that keep a state: the short convolution and the gated delta rule. A launch has
// `tokens` rows of each of some sequences, which follow one another from row `first` of t on. It
// reads the states before these rows and writes those behind them to another buffer; states are
// float32 [sequences, ..]. Tensors without a type are of the type of activations.
#pragma once

#include <cstdint>

#include "ops/gpu/context/context.h"
#include "ops/gpu/language/kernel.h"

namespace flownpu::gpu {

struct ShortConvolutionShape {
  std::int64_t channels = 0;
  std::int64_t taps = 0;
  std::int64_t columns = 0;  // of x
  // Whether x has three parts B, C and x of `channels` each, and y = C conv(B x); otherwise the
  // channels come first and y = SiLU(conv(x)).
  bool is_gated = false;
  // Without gates: whether there is SiLU.
  bool is_silu = true;
};

// conv(x)[t, c] = sum_j w[c, j] x[t - taps + 1 + j, c], where rows before the first are the
// state's. Arguments: x [t, columns], w float32 [channels, taps], states before [sequences, taps -
// 1, channels], y [t, channels], states behind; parameters: first, tokens.
KernelDescription short_convolution(const ShortConvolutionShape& shape);
Grid short_convolution_grid(const ShortConvolutionShape& shape, std::int64_t tokens,
                            std::int64_t sequences = 1);

// For each head of a token decay = s softplus(a . x + b), the logarithm of what its state is
// multiplied by, and share = sigmoid(c . x), by which it takes the error in. Arguments: x [t,
// columns], then in float32 a and c [columns, heads], b and s [heads], decay and share [t, heads];
// parameter: first.
KernelDescription delta_rates(std::int64_t heads, std::int64_t columns);
Grid delta_rates_grid(std::int64_t heads, std::int64_t tokens);

struct DeltaShape {
  std::int64_t key_heads = 0;
  std::int64_t value_heads = 0;  // a multiple of key_heads; neighbours share a key head
  std::int64_t key_size = 0;
  std::int64_t value_size = 0;
  float scale = 1;  // of queries
  // Whether q, k and v are columns of the same rows, in this order, and q and k are divided by
  // their length.
  bool is_packed = false;
};

// The gated delta rule (Yang et al., "Gated Delta Networks", equation 10):
//   S = e^decay S + k (share (v - e^decay S^T k))^T;  y = scale S^T q
// Arguments: q and k [t, key_heads key_size], v [t, value_heads value_size], or if they are packed
// the same rows three times; decay and share float32 [t, value_heads]; states before [sequences,
// value_heads, key_size, value_size], y like v, states behind; parameters: first, tokens.
KernelDescription gated_delta(const DeltaShape& shape);
Grid gated_delta_grid(const DeltaShape& shape, std::int64_t sequences = 1);

// The same in chunks of so many tokens of a sequence, whose large parts are matrix products: two
// kernels in turn. A work-group of the second, as of gated_delta, has so many columns of a state.
constexpr std::int64_t kDeltaChunk = 16;
constexpr std::int64_t kDeltaColumns = 32;
// Whether they are to compute so many tokens of each sequence: no less than a chunk, with a
// work-group's memory of so many bytes.
bool takes_chunks(const DeltaShape& shape, std::int64_t tokens, std::int64_t local_memory);
// Arguments: q, k, decay and share as above, and `pairs`, so many floats that the second kernel
// reads; parameters: first, tokens.
KernelDescription delta_pairs(const DeltaShape& shape);
Grid delta_pairs_grid(const DeltaShape& shape, std::int64_t tokens, std::int64_t sequences = 1);
std::int64_t delta_pairs_floats(const DeltaShape& shape, std::int64_t tokens,
                                std::int64_t sequences = 1);
// Arguments: q, k, v, pairs, states before, y, states behind; parameters: first, tokens.
KernelDescription gated_delta_chunks(const DeltaShape& shape);
Grid gated_delta_chunks_grid(const DeltaShape& shape, std::int64_t sequences = 1);

// y = x / rms(x) weight SiLU(gate), for each part of `size` columns. Arguments: x [t, columns],
// weight float32 [size], gate and y like x.
KernelDescription gated_rms_norm(std::int64_t columns, std::int64_t size, float epsilon);
Grid gated_rms_norm_grid(std::int64_t columns, std::int64_t size, std::int64_t tokens);

// y = x sigmoid(gate). Arguments: x, gate and y [t, columns]; parameter: count, of all elements.
KernelDescription sigmoid_gate();
Grid sigmoid_gate_grid(std::int64_t count);

}  // namespace flownpu::gpu
