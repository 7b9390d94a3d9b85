// SPDX-License-Identifier: Apache-2.0
// DecoderSizes: the sizes and properties of a decoder's layers, which are stored as attributes of
// the node DecoderLayers that a device makes of the layers.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ops/nodes/node.h"

namespace flownpu::layers {

// The operator type of the node that a decoder's layers become; its domain is the device's own.
inline constexpr std::string_view kDecoderLayers = "DecoderLayers";

// The properties that may differ between layers.
struct LayerKind {
  std::int64_t window = 0;  // how many keys a token sees, its own included; 0: all
  std::int64_t table = 0;   // the index of its rotary table
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
  std::int64_t positions = 0;  // that a rotary table covers
  std::string activation;      // "geglu", "swiglu"
  bool post_norms = false;     // outputs of attention and feed-forward get a norm before the sum
  bool qk_norm = false;
  bool qkv_bias = false;  // the QKV projection has a bias
  bool blocks = false;    // attention has bidirectional_blocks
  float epsilon = 0;      // the same in all norms
  float scale = 0;        // factor of the attention scores
  float softcap = 0;      // limit of the attention scores; 0: none
  std::vector<LayerKind> layers;

  // Converts from and to the attributes of a node DecoderLayers. read() throws Error if one is
  // missing or out of range.
  static DecoderSizes read(const Node& node);
  void write(Node& node) const;

  std::int64_t layer_count() const { return static_cast<std::int64_t>(layers.size()); }
  std::int64_t tables() const;
  // The number of rows of the QKV projection.
  std::int64_t packed_heads() const { return (heads + 2 * kv_heads) * head_size; }
  // The number of norm weights at an entry to the residual stream.
  std::int64_t entry_norms() const { return post_norms ? 2 : 1; }
  // Multiply-adds for one token, without those of attention.
  std::int64_t multiply_adds() const;
};

// Throws Error unless the values of a node DecoderLayers are the following, which are the same for
// all devices. The last `extra` inputs are a device's own and not checked:
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
