// SPDX-License-Identifier: Apache-2.0
// Reads the inputs of a run of a node DecoderLayers (decoder_sizes.h): token counts, and the shapes
// of outputs.
#pragma once

#include <cstdint>
#include <span>

#include "ops/nodes/tensor.h"
#include "ops/transformer/decoder.h"

namespace flownpu::transformer {

// Token counts of a sequence: `past` before the run, `count` new ones without padding (a prompt may
// be padded on the right).
struct SequenceTokens {
  std::int64_t past = 0;
  std::int64_t count = 0;
  // A token's row of the rotary tables, less the number of tokens before it: LongRoPE's second
  // table, for example, follows the first one.
  std::int64_t shift = 0;

  std::int64_t total() const { return past + count; }
};

// Throws Error unless the hidden states, lengths and bidirectional_blocks have valid shapes.
void check_call(const Decoder& decoder, std::span<const Tensor> inputs);

// The token counts of the sequence with index `sequence`; check_call() must have accepted `inputs`.
// Throws Error for lengths that do not fit the hidden states, and for positions beyond the rotary
// tables; Unsupported for position_ids that do not follow one another, and for a mask that hides
// a key of a token's window.
SequenceTokens tokens_of(const Decoder& decoder, std::span<const Tensor> inputs,
                         std::int64_t sequence);

// How many of a node's inputs are for layers that keep a state (FoundDecoder::state_inputs), and
// how many of them are a layer's constants.
std::size_t count_of_state_inputs(const Decoder& decoder);
std::size_t count_of_state_constants(const Layer& layer);

// Throws Unsupported if the graph's mask, the last of these inputs, hides one of the first `count`
// tokens of the sequence with index `sequence`.
void check_tokens_of_states(const Tensor& is_token, std::int64_t sequence, std::int64_t count);

// The inputs that are rotary tables, the cosines and the sines of each.
std::span<const Tensor> given_tables(const Decoder& decoder, std::span<const Tensor> inputs);

// Sets the shapes of all outputs. Throws Error if a past key or value has the wrong shape.
void infer_outputs(const Decoder& decoder, std::span<const Tensor> inputs,
                   std::span<Shape> outputs);

}  // namespace flownpu::transformer
