// SPDX-License-Identifier: Apache-2.0
// Finds an encoder of images in the nodes of a partition, and puts one node in its place.
//
//   pixels -> Conv (kernel = stride) -> tokens -> + positions -> layers -> LayerNormalization
//          -> AveragePool -> SimplifiedLayerNormalization -> product
//
// where a layer is: LayerNormalization, packed QKV product, FlowQKVAttention (not causal, without
// grouping), output product with the residual, LayerNormalization, product with GELU (tanh),
// product with the residual. Products are DenseMatMul or Q4NXMatMul, which may have biases. Sizes
// must be the same in all layers.
#pragma once

#include <string>
#include <vector>

#include "ops/nodes/node.h"
#include "ops/npu/nodes/encoder_shape.h"

namespace flownpu::npu {

// The node EncoderLayers:
//   input    pixels f32 [N, C, I, I]
//   output   features f32 [N, tokens, D]
//   packed   weights, vectors (weights/pack.h)

// Whether there are a convolution and attention that is not causal, by which encoders are
// recognised.
bool is_encoder(const std::vector<Node>& nodes);

// Whether the array would compute the node as a part of an encoder.
bool is_for_encoder(const Node& node);

// The nodes with the encoder as one node, without nodes that nothing reads any more. `outputs`:
// names of the values that leave the partition. Throws Error if there is no such encoder, with the
// node in the way and what was expected.
std::vector<Node> with_encoder_layers(const std::vector<Node>& nodes,
                                      const std::vector<std::string>& outputs);

}  // namespace flownpu::npu
