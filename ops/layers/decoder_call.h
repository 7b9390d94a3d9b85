// SPDX-License-Identifier: Apache-2.0
// What the inputs of a run of DecoderLayers say (decoder_sizes.h): tokens, and shapes of outputs.
#pragma once

#include <cstdint>
#include <span>

#include "ops/layers/decoder_sizes.h"
#include "ops/nodes/tensor.h"

namespace flownpu::layers {

// Tokens of a sequence: `past` before the run, `count` new ones (a prompt may be padded on the
// right).
struct SequenceTokens {
  std::int64_t past = 0;
  std::int64_t count = 0;

  std::int64_t total() const { return past + count; }
};

// Throws Error unless hidden states, lengths and blocks are of the shapes that a run has.
void check_call(const DecoderSizes& sizes, std::span<const Tensor> inputs);

// Lengths, read from an input that check_call took. Throws Error for lengths that do not fit it,
// and for positions that the rotary tables lack.
SequenceTokens tokens_of(const DecoderSizes& sizes, std::span<const Tensor> inputs,
                         std::int64_t sequence);

// Throws Error for pasts of other shapes.
void infer_outputs(const DecoderSizes& sizes, std::span<const Tensor> inputs,
                   std::span<Shape> outputs);

}  // namespace flownpu::layers
