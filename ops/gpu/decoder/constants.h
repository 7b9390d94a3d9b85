// SPDX-License-Identifier: Apache-2.0
// A decoder's constants in a device's memory. They are the last inputs of the node DecoderLayers in
// the device's domain, in this order:
//
//   for each layer  weights of QKV, output, gate and up, down; weights of the norms at both entries
//                   of the residual stream (with post-norms: of what is added, then of the sum; the
//                   first layer's has nothing added, whose weight is left out); with QK-norm its
//                   weights of queries and of keys
//   at last         weights of the last entry's norms; the LM head; cosines and sines of each table
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ops/formats/q4nx.h"
#include "ops/gpu/opencl/context.h"
#include "ops/layers/decoder_constants.h"
#include "ops/layers/decoder_sizes.h"
#include "ops/nodes/node.h"

namespace flownpu::gpu {

struct Weight {
  Buffer blocks;
  q4nx::Layout layout;
};

// Weights of the norms at an entry of the residual stream.
struct EntryNorms {
  Buffer added;  // with post-norms
  Buffer sum;
};

struct PlacedConstants {
  struct Layer {
    Weight qkv;
    Weight output;
    Weight gate_up;
    Weight down;
    EntryNorms first;
    EntryNorms middle;
    Buffer q_norm;
    Buffer k_norm;
  };
  struct Rotary {
    Buffer cosines;
    Buffer sines;
  };
  std::vector<Layer> layers;
  EntryNorms last;
  Weight head;
  std::vector<Rotary> rotary;
  // Bytes of the weights: copied, and read in place.
  std::int64_t copied_bytes = 0;
  std::int64_t mapped_bytes = 0;
};

std::size_t count_of_constants(const layers::DecoderSizes& sizes);

// The values that they have in the graph, in the node's order. `nodes`: those of which the
// constants were found.
std::vector<Value> values_of_constants(const layers::DecoderSizes& sizes,
                                       const layers::DecoderConstants& constants,
                                       const std::vector<Node>& nodes);

// Weights are read where the file is mapped by devices that are CPUs, copied by others: a GPU's
// driver may copy what it is told to use in place, and not say so. Throws OpenClError; Error for a
// constant of another shape than the decoder's.
PlacedConstants place_constants(Context& context, const layers::DecoderSizes& sizes,
                                const Node& node);

}  // namespace flownpu::gpu
