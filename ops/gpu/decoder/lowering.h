// SPDX-License-Identifier: Apache-2.0
// Finds a decoder in the nodes of a partition (ops/transformer/decoder_matcher.h), and puts one
// node in its place: DecoderLayers (ops/transformer/decoder.h), whose constants are its last inputs
// (constants.h).
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "ops/device.h"
#include "ops/nodes/node.h"

namespace flownpu::gpu {

bool is_decoder_layers(const Node& node);

// Lowers a partition. If there is no decoder, the nodes stay as they are, with the reason for each
// that the device is for. `outputs`: names of the values that leave the partition.
Lowered lower_decoder(std::vector<Node> nodes, const std::vector<std::string>& outputs);

// The products and attentions among the nodes, each with `reason` for not being on the device.
std::vector<Lowered::OnHost> left_on_host(const std::vector<Node>& nodes,
                                          const std::string& reason);

}  // namespace flownpu::gpu
