// SPDX-License-Identifier: Apache-2.0
// DecoderShape: the sizes of a decoder's layers, and what is packed for the array where
// (aie/programs/decoder_shape.py, which is the layouts' definition):
//
//   weights   u8    [layer][QKV | output | gate and up | down], then the LM head; wide Q4NX
//                   blocks (ops/formats/q4nx.h)
//   vectors   bf16  [layer][norms][line], each layer followed by its QK-norm weights [q, k][d];
//                   then the final norms
//   rotary    bf16  [tables][positions][d]: cos[d/2], sin[d/2]
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ops/nodes/node.h"
#include "ops/npu/nodes/lowered_node.h"

namespace flownpu::npu {

// The node that a decoder's layers become.
inline constexpr std::string_view kDecoderLayers = "DecoderLayers";

// y [rows] = W [rows, columns] x; gated: of two such W, y = act(gate x) * (up x).
struct Projection {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  bool gated = false;

  // Bytes of its weight in wide Q4NX blocks; gated: of both weights.
  std::size_t bytes() const;
};

// What differs between layers.
struct LayerKind {
  std::int64_t window = 0;  // keys that a token sees, its own included; 0: all
  std::int64_t table = 0;   // which rotary table turns its heads
  bool window_sized_cache = false;

  bool operator==(const LayerKind&) const = default;
};

struct DecoderShape {
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
  bool blocks = false;  // attention has bidirectional_blocks
  float epsilon = 0;    // of all norms
  float scale = 0;      // of the scores
  std::vector<LayerKind> layers;

  // From and to the attributes of a node DecoderLayers. Throws Error if one is missing, or of a
  // size that no decoder has.
  static DecoderShape read(const Node& node);
  void write(Node& node) const;

  std::int64_t layer_count() const { return static_cast<std::int64_t>(layers.size()); }
  std::int64_t tables() const;

  // I rounded up to 64: the dequantisation engine weaves a gate and an up projection 64 columns at
  // a time (aie/designs/dequant_engine.py). What is added has zero weights.
  std::int64_t padded_feed_forward() const;
  // D rounded up to a wide block's columns: how vectors are moved.
  std::int64_t line() const;
  // QKV, output, gate and up, down.
  std::array<Projection, 4> projections() const;
  Projection head() const { return {.rows = vocabulary, .columns = hidden}; }
  std::size_t layer_weight_bytes() const;
  // Norm weights of an entry of the residual stream.
  std::int64_t entry_norms() const { return post_norms ? 2 : 1; }
  std::size_t layer_vector_bytes() const;
  std::size_t final_vector_bytes() const;
  // Sizes of what is packed (weights/pack_decoder.h).
  std::size_t weight_bytes() const;
  std::size_t vector_bytes() const;
  std::size_t rotary_bytes() const;
  // Bytes of a position of a rotary table; a key or a value has as many.
  std::size_t angle_bytes() const;
};

}  // namespace flownpu::npu
