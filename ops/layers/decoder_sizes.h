// SPDX-License-Identifier: Apache-2.0
// DecoderSizes: of which sizes the layers of a decoder are, and what they do; as attributes of the
// node that a device makes of them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ops/nodes/node.h"

namespace flownpu::layers {

// The node that a decoder's layers become, in a domain of the device's own.
inline constexpr std::string_view kDecoderLayers = "DecoderLayers";

// What differs between layers.
struct LayerKind {
  std::int64_t window = 0;  // keys that a token sees, its own included; 0: all
  std::int64_t table = 0;   // which rotary table turns its heads
  bool window_sized_cache = false;

  bool operator==(const LayerKind&) const = default;
};

struct DecoderSizes {
  std::int64_t hidden = 0;        // D
  std::int64_t heads = 0;         // H
  std::int64_t kv_heads = 0;      // G
  std::int64_t head_size = 0;     // d
  std::int64_t feed_forward = 0;  // I, the model's
  std::int64_t vocabulary = 0;
  std::int64_t positions = 0;  // of a rotary table
  std::string activation;      // "geglu", "swiglu"
  bool post_norms = false;     // outputs of attention and feed-forward are normalised, then added
  bool qk_norm = false;
  bool qkv_bias = false;  // of the QKV projection
  bool blocks = false;    // attention has bidirectional_blocks
  float epsilon = 0;      // of all norms
  float scale = 0;        // of the scores
  float softcap = 0;      // of the scores; 0: none
  std::vector<LayerKind> layers;

  // From and to the attributes of a node DecoderLayers. Throws Error if one is missing, or of a
  // size that no decoder has.
  static DecoderSizes read(const Node& node);
  void write(Node& node) const;

  std::int64_t layer_count() const { return static_cast<std::int64_t>(layers.size()); }
  std::int64_t tables() const;
  // Rows of the QKV projection.
  std::int64_t packed_heads() const { return (heads + 2 * kv_heads) * head_size; }
  // Norm weights of an entry of the residual stream.
  std::int64_t entry_norms() const { return post_norms ? 2 : 1; }
  // For one token, without attention's.
  std::int64_t multiply_adds() const;
};

// Throws Error unless the node DecoderLayers begins as all devices' do, `extra` of its inputs left
// out:
//   inputs   hidden f32 [B, S, D]; total_sequence_length int32; seqlens_k int32 [B]; past key, past
//            value of each layer; with blocks, bidirectional_blocks int32 [B, S] of all layers
//   outputs  logits f32 [B, 1, V]; present key, present value of each layer
void check_values_of_decoder(const Node& node, const DecoderSizes& sizes, std::size_t extra = 0);

inline constexpr std::size_t kHidden = 0;
inline constexpr std::size_t kTotalTokens = 1;
inline constexpr std::size_t kTokensBeforeLast = 2;
inline constexpr std::size_t kFirstPast = 3;
inline constexpr std::size_t kLogits = 0;
inline constexpr std::size_t kFirstPresent = 1;

}  // namespace flownpu::layers
