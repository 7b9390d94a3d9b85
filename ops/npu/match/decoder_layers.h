// SPDX-License-Identifier: Apache-2.0
// Finds a decoder in the nodes of a partition, and puts one node in its place.
//
// What is found, in a graph of any origin:
//
//   norm -> layers -> norm -> last token -> LM head
//
// where a layer is: packed QKV projection, attention (QK-norm and RoPE inside), output projection,
// (norm,) norm with the residual, gate/up projection, down projection, (norm,) norm with the
// residual. Sizes, activation and which norms there are must be the same in all layers; windows,
// rotary tables and caches may differ.
#pragma once

#include <string>
#include <vector>

#include "ops/nodes/node.h"
#include "ops/npu/nodes/decoder_shape.h"

namespace flownpu::npu {

// The node DecoderLayers:
//   inputs   hidden f32 [1, S, D]; total_sequence_length int32; seqlens_k int32 [1]; past key, past
//            value of each layer; with blocks, bidirectional_blocks int32 [1, S] of all layers
//   outputs  logits f32 [1, 1, V]; present key, present value of each layer
//   packed   weights, vectors, rotary (weights/pack_decoder.h)
inline constexpr std::size_t kHidden = 0;
inline constexpr std::size_t kTotalTokens = 1;
inline constexpr std::size_t kTokensBeforeLast = 2;
inline constexpr std::size_t kFirstPast = 3;
inline constexpr std::size_t kLogits = 0;
inline constexpr std::size_t kFirstPresent = 1;

// Whether the node is a projection or an attention: what the array is for.
bool is_for_array(const Node& node);

// The nodes with the decoder's layers as one, without those that nothing reads any more; `outputs`:
// names of the values that leave the partition. Throws Error where there is no such decoder: which
// node is in the way, and what was expected.
std::vector<Node> with_decoder_layers(const std::vector<Node>& nodes,
                                      const std::vector<std::string>& outputs);

}  // namespace flownpu::npu
