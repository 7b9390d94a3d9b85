// SPDX-License-Identifier: Apache-2.0
// Finds a decoder in the nodes of a partition, in a graph of any origin:
//
//   norm -> layers -> norm -> last token -> LM head
//
// where a layer is: packed QKV projection, attention (QK-norm and RoPE inside), output projection,
// (norm,) norm with the residual, gate/up projection, down projection, (norm,) norm with the
// residual. Sizes, activation and which norms there are must be the same in all layers; windows,
// rotary tables and caches may differ.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "ops/layers/decoder_constants.h"
#include "ops/layers/decoder_sizes.h"
#include "ops/layers/graph_walk.h"
#include "ops/nodes/node.h"

namespace flownpu::layers {

// What a device that computes decoders does not, and how messages call it.
struct DecoderLimits {
  std::string who;    // "the array"
  std::string means;  // that computes: "the array's designs"
  bool softcap = false;
  bool batches = false;  // several sequences at once
  bool int8_caches = false;
  bool without_rope = false;  // layers that turn no heads, among those that do
  bool qkv_bias = false;      // of QKV projections
  // The hidden size and that of heads are multiples of it.
  std::int64_t multiple = 1;
};

// Points into the nodes.
struct FoundDecoder {
  DecoderSizes sizes;
  DecoderConstants constants;
  // The nodes that the decoder is made of; of these the first norm, the attentions in the order of
  // their layers, and the LM head.
  std::unordered_set<const Node*> taken;
  const Node* first_norm = nullptr;
  std::vector<const Node*> attentions;
  const Node* head = nullptr;

  // DecoderLayers in a device's domain: what decoder_sizes.h says, without constants.
  Node node(std::string_view domain) const;
};

// `graph`: of `nodes`. Throws Error where there is no such decoder: which node is in the way, and
// what was expected.
FoundDecoder find_decoder(const std::vector<Node>& nodes, const GraphWalk& graph,
                          const DecoderLimits& limits);

}  // namespace flownpu::layers
