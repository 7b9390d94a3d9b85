// SPDX-License-Identifier: Apache-2.0
// Finds a decoder in the nodes of a partition, and puts one node in its place
// (ops/layers/decoder_matcher.h).
#pragma once

#include <string>
#include <vector>

#include "ops/nodes/node.h"

namespace flownpu::npu {

// Whether the node is a projection, an attention or a mixture of experts: what the array is for.
bool is_for_array(const Node& node);

// The nodes with the decoder's layers as one, without those that nothing reads any more; `outputs`:
// names of the values that leave the partition. The node DecoderLayers (ops/layers/decoder_sizes.h)
// is one sequence's, and has packed: weights, vectors, rotary (weights/pack_decoder.h). Throws
// Error where there is no such decoder: which node is in the way, and what was expected.
std::vector<Node> with_decoder_layers(const std::vector<Node>& nodes,
                                      const std::vector<std::string>& outputs);

}  // namespace flownpu::npu
