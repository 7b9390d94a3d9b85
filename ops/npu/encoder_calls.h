// SPDX-License-Identifier: Apache-2.0
// The calls of an encoder for one image, in order, with the buffers they share; what
// python/flownpu/ npu_encoder_calls.py builds is what they are found by.
//
// Buffers, bf16, `rows` = padded_tokens(patches):
//
//   weights, vectors                 encoder_shape.h
//   patches    [rows][line]          A of the embedding, from the host
//   embedded   [rows][padded D]      its product
//   hidden     [patches][D]          the residual stream at a layer's beginning
//   x          [rows][line]          that or `residual`, normalised: A of QKV, and of up
//   qkv        [rows][padded 3 H d]  products
//   context    [rows][line]          attention's output: A of the output product
//   attended   [rows][padded D]      its product
//   residual   [patches][D]          the residual stream between attention and feed-forward
//   activated  [rows][line]          GELU: A of down
//   update     [rows][padded D]      its product
//   normal     [patches][D]          after the last layer, normalised
//   pooled     [padded tokens][D]    A of the projector; K is padded by what follows a row
//   features   [padded tokens][padded features], for the host
//
// Lines have a 1 where a weight has its bias (encoder_shape.h); no call writes there.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "ops/npu/artifacts.h"
#include "ops/npu/encoder_shape.h"

namespace flownpu::npu {

// A part of a buffer.
struct NamedView {
  std::string_view buffer;
  std::size_t offset = 0;
  std::size_t bytes = 0;
};

struct EncoderCall {
  std::string_view op_type;
  CallAttributes attributes;
  std::string name;  // for messages
  std::vector<NamedView> arguments;
};

std::vector<EncoderCall> encoder_calls(const EncoderShape& shape);

// The buffers whose lines are read by a product with a bias, and the product.
std::map<std::string_view, DenseProjection> encoder_lines(const EncoderShape& shape);

}  // namespace flownpu::npu
