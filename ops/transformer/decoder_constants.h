// SPDX-License-Identifier: Apache-2.0
// Pointers to the constants of a decoder in its model.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ops/formats/q4nx.h"
#include "ops/nodes/node.h"

namespace flownpu::transformer {

// The Q4NX weight of a product in a graph, in any layout of ops/formats/q4nx.h.
struct Q4NXWeight {
  const std::byte* blocks = nullptr;
  q4nx::Layout layout;
  std::int64_t rows = 0;     // M
  std::int64_t columns = 0;  // K
  bool gated = false;        // the gate's M rows, padded to whole blocks, then the up projection's
  float factor = 1;          // of all weights

  // Whether codes stand for int8 values, as those of 8 bits and of tables do.
  bool eight_bits() const { return layout.is_signed(); }
  std::int64_t row_blocks() const { return q4nx::row_blocks(rows) * (gated ? 2 : 1); }
  // The weight of the same size that is `count` weights behind it in memory.
  Q4NXWeight following(std::int64_t count) const {
    Q4NXWeight other = *this;
    other.blocks += count * row_blocks() * layout.row_bytes(columns);
    return other;
  }
};

// Reads the weights of the first expert of a Q4NXMoE, of gate and up projections and of the down
// projection; the other experts' follow each. Throws Error as below.
std::pair<Q4NXWeight, Q4NXWeight> read_first_expert(const Node& mixture);

// Reads W of a Q4NXMatMul. Throws Error that names the node unless W is an initializer whose shape
// fits M, K and gating.
Q4NXWeight read_q4nx_weight(const Node& product);

// A node's input, such as a norm's weight. Throws Error that names the node unless it is an
// initializer, float [size].
const float* read_vector(const Node& node, std::size_t input, std::int64_t size);

// The constants of a layer: Q4NX weights, and f32 vectors, where null stands for zeros.
struct LayerConstants {
  // The first projection of the hidden state, and another whose rows follow its own: of output
  // gates, or of what gates a delta rule's output.
  Q4NXWeight qkv;
  std::optional<Q4NXWeight> gates;
  const float* qkv_bias = nullptr;  // [(H + 2 G) d]
  Q4NXWeight output;
  const float* output_bias = nullptr;  // [D]
  const float* sinks = nullptr;        // [H], if there are any
  Q4NXWeight gate_up;                  // of the first expert, where there are experts
  Q4NXWeight down;
  // Weights [D] of the norms at the layer's two entries to the residual stream (before attention
  // and before the feed-forward), entry_norms() for each.
  std::vector<const float*> norms;
  // Weights of the norms of queries and keys, as long as qk_norm_sizes().
  std::array<const float*, 2> qk_norm{};
};

// Both are null for layers without RoPE, which is the same as cosines of 1 and sines of 0.
struct RotaryTable {
  const float* cosine = nullptr;  // [positions, r/2], r: Decoder::rotated_size or d
  const float* sine = nullptr;
};

struct TableSize {
  std::int64_t rows = 0;  // 0: it is no table
  std::int64_t columns = 0;
};
// The size of a table that is an initializer, float [positions, r/2].
TableSize size_of_table(const Value* table);
// The size of one that the graph computes. A run checks what is not known before: there may be any
// number of rows, and `half` of a head's elements are expected as columns.
TableSize size_of_given_table(const Value& table, std::int64_t half);

struct DecoderConstants {
  std::vector<LayerConstants> layers;
  std::vector<const float*> final_norms;  // entry_norms()
  Q4NXWeight head;
  std::vector<RotaryTable> rotary;
};

}  // namespace flownpu::transformer
