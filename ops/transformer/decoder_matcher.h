// SPDX-License-Identifier: Apache-2.0
// Finds a decoder among the nodes of a partition, whichever tool wrote the graph:
//
//   norm -> layers -> norm -> last token -> LM head
//
// where a layer is: packed QKV projection, attention (QK-norm and RoPE inside), output projection,
// (norm,) norm with the residual, gate/up projection, down projection, (norm,) norm with the
// residual. In the place of QKV projection and attention there may be a gated delta rule or a short
// convolution (state_matcher.cc). A mixture of experts may be in the place of gate, up and down
// projections. Sizes, activation and the presence of norms must be the same in all layers; mixers,
// windows, rotary tables, masks and caches may differ. What a projection adds to the residual
// stream may be multiplied by a number before (Granite's residual_multiplier).
#pragma once

#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "ops/nodes/node.h"
#include "ops/transformer/decoder.h"
#include "ops/transformer/decoder_constants.h"
#include "ops/transformer/decoder_limits.h"
#include "ops/transformer/graph/walk.h"

namespace flownpu::transformer {

// The values of a rotary table; null for layers without RoPE.
struct RotaryValues {
  const Value* cosine = nullptr;
  const Value* sine = nullptr;

  // Whether the names are the same.
  bool operator==(const RotaryValues& other) const;
  RotaryTable constants() const {
    if (cosine == nullptr) return {};
    return {static_cast<const float*>(cosine->constant), static_cast<const float*>(sine->constant)};
  }
};

// A layer's values beside the tokens where it keeps a state: the constants of its mixer, in the
// order of `state_constants`, and its states before and behind the tokens.
struct StateValues {
  std::vector<Value> constants;
  std::vector<Value> pasts;
  std::vector<Value> presents;
};

// A decoder that was found; points into the nodes.
struct FoundDecoder {
  Decoder decoder;
  DecoderConstants constants;
  // All nodes of the decoder; among these the first (a norm, or the QKV
  // projection where there is none before it), the attentions in the order of their
  // layers, and the LM head.
  std::unordered_set<const Node*> taken;
  const Node* first = nullptr;
  std::vector<const Node*> attentions;
  std::vector<const Node*> mixtures;  // the experts of each layer, if layers have any
  const Node* head = nullptr;
  const Value* position_ids = nullptr;  // null: positions are counted
  std::vector<const Value*> masks;
  std::vector<RotaryValues> tables;
  std::vector<StateValues> states;  // of the layers that keep them, in order
  const Value* is_token = nullptr;  // f32 [B, S, 1], 0 for padding; null: the graph has none

  // The decoder as a node DecoderLayers in a device's domain (decoder_sizes.h), without constants
  // and without the inputs of states, which follow a device's own (state_inputs).
  Node node(std::string_view domain) const;
  // The constants and states before the tokens of each layer that keeps them, and at their end
  // is_token, absent where there is none; none if no layer keeps a state.
  std::vector<Value> state_inputs() const;
};

// `graph`: the walk over `nodes`. Throws Error if there is no such decoder; the message says which
// node is in the way, and what was expected.
FoundDecoder find_decoder(const std::vector<Node>& nodes, const GraphWalk& graph,
                          const DecoderLimits& limits);

}  // namespace flownpu::transformer
