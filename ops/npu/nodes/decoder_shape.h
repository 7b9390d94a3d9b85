// SPDX-License-Identifier: Apache-2.0
// DecoderShape: the packing of a decoder's constants for the array. aie/programs/decoder_shape.py
// defines the layouts:
//
//   weights   u8    [layer][QKV | output | gate and up | down], then the LM head; with QKV the
//   gates
//                   of attention's output, and in its place what a state is made of; wide Q4NX
//                   blocks (ops/formats/q4nx.h), of 8 bits two planes of each (nodes/planes.h)
//   experts   u8    [layer][expert][gate and up | down], where the feed-forward is a mixture of
//                   experts; a layer's weights then are QKV | output
//   vectors   bf16  [layer][norms][line], each layer followed by its sinks (nodes/sinks.h) and its
//                   QK-norm weights, q and k; then the final norms
//   rotary    bf16  [tables][positions][d]: cos[d/2], sin[d/2]; none if the tables are inputs
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ops/nodes/node.h"
#include "ops/npu/nodes/lowered_node.h"
#include "ops/transformer/decoder.h"

namespace flownpu::npu {

// y [rows] = W [rows, columns] x; if gated there are two such W, and y = act(gate x) * (up x).
struct Projection {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  bool gated = false;
  bool eight_bits = false;

  // Bytes of its weight as packed; if gated, of both weights.
  std::size_t bytes() const;
};

struct DecoderShape : transformer::Decoder {
  // I rounded up to 64, because the dequantisation engine interleaves gate and up projections 64
  // columns at a time (aie/designs/dequant_engine.py). The added rows and columns have zero
  // weights.
  std::int64_t padded_feed_forward() const;
  // D, and one column more if there is a bias. D and the head size are multiples of a group's
  // columns, so that a bias begins a group of its own, which has no weights.
  std::int64_t qkv_columns() const;
  // The same for a layer's output projection.
  std::int64_t biased_columns(const transformer::Layer& layer) const;
  // qkv_columns() rounded up to a wide block's columns: the elements of a norm's weight as packed.
  std::int64_t line() const;
  // QKV, output, gate and up, down of a layer.
  std::array<Projection, 4> projections(const transformer::Layer& layer) const;
  // Bytes of the last two.
  std::size_t expert_bytes(const transformer::Layer& layer) const;
  Projection head() const {
    return {.rows = vocabulary, .columns = hidden, .eight_bits = head_eight_bits};
  }
  // Bytes of the packed constants (weights/pack.h).
  std::size_t weight_bytes() const;
  std::size_t expert_bytes() const;  // of all layers' experts
  std::size_t vector_bytes() const;
  std::size_t rotary_bytes() const;
  // For each element of a head of queries or keys as the array has it, where it is in the graph:
  // the array turns i with i + d/2, and the graph the first r elements, i with i + r/2, and not the
  // rest (HeadOrder in python/flownpu/convert/weights/kinds.py is the same order).
  std::vector<std::int64_t> head_order() const;
  // Bytes of a position of a rotary table, which equal those of a key or a value in bf16.
  std::size_t angle_bytes() const;
};

}  // namespace flownpu::npu
