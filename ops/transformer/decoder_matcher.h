// SPDX-License-Identifier: Apache-2.0
// Finds a decoder among the nodes of a partition, whichever tool wrote the graph:
//
//   norm -> layers -> norm -> last token -> LM head
//
// where a layer is: packed QKV projection, attention (QK-norm and RoPE inside), output projection,
// (norm,) norm with the residual, gate/up projection, down projection, (norm,) norm with the
// residual. Sizes, activation and the presence of norms must be the same in all layers; windows,
// rotary tables and caches may differ.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "ops/nodes/node.h"
#include "ops/transformer/decoder.h"
#include "ops/transformer/decoder_constants.h"
#include "ops/transformer/graph_walk.h"

namespace flownpu::transformer {

// The kinds of layers that a device computes, and how messages refer to the device. A layer of
// another kind is left to the device's host, with the reason.
struct DecoderLimits {
  std::string who;    // "the array"
  std::string means;  // what computes on it: "the array's designs"
  bool softcap = false;
  bool batches = false;  // several sequences at once
  bool int8_caches = false;
  bool without_rope = false;    // layers without RoPE, among layers with it
  bool qkv_bias = false;        // a bias of the QKV projection
  bool experts = false;         // mixtures of experts
  bool all_logits = false;      // logits of all tokens, not only of the last
  bool position_ids = false;    // positions as an input, which chooses rows of rotary tables
  bool attention_bias = false;  // an input that a run checks to mask nothing but later keys
  // The hidden size and the head size must be multiples of it.
  std::int64_t multiple = 1;
};

// Why the device does not compute such a mixer, or such a feed-forward; empty if it does.
std::string unsupported(const Attention& attention, const DecoderLimits& limits);
std::string unsupported(const FeedForward& feed_forward, const DecoderLimits& limits);

// A decoder that was found; points into the nodes.
struct FoundDecoder {
  Decoder decoder;
  DecoderConstants constants;
  // All nodes that the decoder consists of; then, of these, the first norm, the attentions in the
  // order of their layers, and the LM head.
  std::unordered_set<const Node*> taken;
  const Node* first_norm = nullptr;
  std::vector<const Node*> attentions;
  const Node* head = nullptr;
  const Value* position_ids = nullptr;  // null: positions are counted
  const Value* attention_bias = nullptr;

  // The decoder as a node DecoderLayers in a device's domain (decoder_sizes.h), without constants.
  Node node(std::string_view domain) const;
};

// `graph`: the walk over `nodes`. Throws Error if there is no such decoder; the message says which
// node is in the way, and what was expected.
FoundDecoder find_decoder(const std::vector<Node>& nodes, const GraphWalk& graph,
                          const DecoderLimits& limits);

}  // namespace flownpu::transformer
