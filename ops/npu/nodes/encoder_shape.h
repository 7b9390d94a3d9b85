// SPDX-License-Identifier: Apache-2.0
// EncoderShape: the sizes of an encoder of images (a vision transformer), and how its constants are
// packed in the array's host buffers; aie/programs/encoder_shape.py defines the same:
//
//   weights   bf16  panels (aie/kernels/README.md) of the patches' embedding, of each layer's
//                   [QKV | output | up | down], and of the projector
//   vectors   bf16  [patches][D]: what is added to the embeddings for their positions; then
//                   [norms][weight, bias][D], two norms a layer and the one after the last; then
//                   the pooled tokens' norm [D]
//
// A projection's bias is a row of its weight, where activations have a 1 (aie/designs/bias.py). So
// on the array K is rounded up to 32, one row more for the bias, and zeros up to a multiple of 256.
// A line of activations has as many elements.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "ops/nodes/node.h"
#include "ops/transformer/graph/fields.h"

namespace flownpu::npu {

// The op_type of the node that an encoder becomes.
inline constexpr std::string_view kEncoderLayers = "EncoderLayers";

// y [columns] = act(W x + b), for x [inner].
struct DenseProjection {
  std::int64_t inner = 0;    // K
  std::int64_t columns = 0;  // N
  bool has_bias = true;
  bool gelu = false;

  // The row of the weight, and the column of the activations, that belong to the bias.
  std::int64_t bias_row() const;
  // K as the call has it, with the bias's row.
  std::int64_t rows() const { return has_bias ? bias_row() + 1 : inner; }
  // Rows of the weight in memory; with a bias also the elements of a line of activations.
  std::int64_t padded_rows() const;
  // N in memory: a multiple of a panel's columns, and at least those that a call computes.
  std::int64_t padded_columns() const;
  // Bytes of the weight as packed.
  std::size_t bytes() const;
};

// Bounds for which counts of bytes stay below 2^63: no product has more than 2^27 rows, or 2^22
// columns. The sizes that fields() accepts are some ten times those of the largest known models.
struct EncoderShape {
  static constexpr std::string_view kName = "encoder";

  std::int64_t channels = 0;
  std::int64_t patch = 0;
  std::int64_t grid = 0;
  std::int64_t hidden = 0;
  std::int64_t heads = 0;
  std::int64_t head_size = 0;
  std::int64_t feed_forward = 0;
  std::int64_t layers = 0;
  std::int64_t pooling = 0;
  std::int64_t features = 0;
  float epsilon = 0;
  float pooled_epsilon = 0;
  float scale = 0;

  bool operator==(const EncoderShape&) const = default;

  template <typename Visit>
  static void fields(Visit&& visit) {
    using transformer::field;
    visit(field("channels", &EncoderShape::channels, "channels of a pixel", 1, 1 << 6));
    visit(field("patch", &EncoderShape::patch, "pixels of a patch's side", 1, 1 << 10));
    visit(field("grid", &EncoderShape::grid, "patches of an image's side", 1, 1 << 10));
    visit(field("hidden", &EncoderShape::hidden, "elements of a hidden state D", 1, 1 << 18));
    visit(field("heads", &EncoderShape::heads, "heads H, without grouping", 1, 1 << 10));
    visit(field("head_size", &EncoderShape::head_size, "elements of a head d", 1, 1 << 10));
    visit(field("feed_forward", &EncoderShape::feed_forward, "rows I of the up projection", 1,
                1 << 18));
    visit(field("layers", &EncoderShape::layers, "layers", 1, 1 << 10));
    visit(field("pooling", &EncoderShape::pooling,
                "side, in patches, of the square that becomes one token", 1, 1 << 10));
    visit(field("features", &EncoderShape::features,
                "elements of a token: the decoder's hidden size", 1, 1 << 18));
    visit(field("epsilon", &EncoderShape::epsilon, "of the layer norms"));
    visit(field("pooled_epsilon", &EncoderShape::pooled_epsilon, "of the norm of pooled tokens"));
    visit(field("scale", &EncoderShape::scale, "factor of the scores"));
  }

  // Converts from and to the attributes of a node EncoderLayers. Throws Error if one is missing, or
  // of a size that no encoder has.
  static EncoderShape read(const Node& node);
  void write(Node& node) const;

  std::int64_t pixels() const { return channels * grid * patch * grid * patch; }
  std::int64_t patches() const { return grid * grid; }
  std::int64_t tokens() const { return patches() / (pooling * pooling); }
  std::int64_t norms() const { return 2 * layers + 1; }

  DenseProjection embedding() const;
  // QKV, output, up, down.
  std::array<DenseProjection, 4> projections() const;
  DenseProjection projector() const;
  // Bytes of all packed weights; of all packed vectors.
  std::size_t weight_bytes() const;
  std::size_t vector_bytes() const;
};

}  // namespace flownpu::npu
