// SPDX-License-Identifier: Apache-2.0
// A decoder's constants in a device's memory. They are the last inputs of the node DecoderLayers in
// the device's domain, in this order:
//
//   for each layer  weights of the first projection (QKV), of gates if there are any, output, gate
//                   and up, down, or in the place of these two the inputs of a Q4NXMoE from its
//                   router on (MixtureWeights), some absent; norm weights of both entries of the
//                   residual stream; of attention with QK-norm the weights for queries and for
//                   keys; biases of QKV and of the output projection, each absent where a layer has
//                   none and others have; sinks
//   at last         norm weights of the last entry; the LM head; cosines and sines of each table,
//                   absent for layers without RoPE; none if the graph makes tables
//
// An entry is where an update is added to the residual stream and the sum is normalised. With
// post-norms it has two weights, for the update and for the sum, else the latter alone; so has the
// first layer's first entry, where nothing is added. Before these constants are the inputs for
// states (FoundDecoder::state_inputs), among which a layer's own constants are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ops/formats/q4nx.h"
#include "ops/gpu/context/context.h"
#include "ops/gpu/operators/experts/mixture.h"
#include "ops/nodes/node.h"
#include "ops/transformer/decoder.h"
#include "ops/transformer/decoder_constants.h"

namespace flownpu::gpu {

struct Weight {
  Buffer blocks;
  q4nx::Layout layout;
  float factor = 1;  // of all weights
};

// Norm weights of an entry of the residual stream: for what is added, and for the sum.
struct EntryNorms {
  Buffer added;  // only with post-norms
  Buffer sum;
};

// The constants of a gated delta rule, in the order of its inputs; a short convolution has the taps
// alone.
enum StateConstant : std::uint8_t {
  kTaps,
  kDecayWeight,
  kShareWeight,
  kTimeBias,
  kDecayScale,
  kNormWeight,
};

// Weights and norms of a layer.
struct LayerConstants {
  Weight qkv;
  Weight gates;  // only where gate_rows() are not 0
  Weight output;
  Weight gate_up;
  Weight down;
  MixtureWeights experts;  // in the place of these two
  EntryNorms first;
  EntryNorms middle;
  Buffer q_norm;
  Buffer k_norm;
  // Without a handle where the decoder has none.
  Buffer qkv_bias;
  Buffer output_bias;
  Buffer sinks;
  std::vector<Buffer> state;  // by StateConstant
};

struct PlacedConstants {
  struct Rotary {
    Buffer cosines;
    Buffer sines;
    // Rows are those of positions, else those of the tokens that are computed at once.
    bool by_position = true;
  };
  std::vector<LayerConstants> layers;
  EntryNorms last;
  Weight head;
  std::vector<Rotary> rotary;
  // Bytes of the weights: those that were copied, and those that are read in place.
  std::int64_t copied_bytes = 0;
  std::int64_t mapped_bytes = 0;
};

// Rows of the projection of gates: of attention's output, or of a delta rule's; 0: there is none.
std::int64_t gate_rows(const transformer::Decoder& decoder, const transformer::Layer& layer);

// Attributes of the node for what its constants do not hold: the factors of output and down
// projections, if one is not 1.
void write_factors(Node& node, const transformer::DecoderConstants& constants);

// How many constants the node has.
std::size_t count_of_constants(const transformer::Decoder& decoder);

// The constants as values of the graph, in the node's order. `nodes`: those in which the constants
// were found; `mixtures`: of each layer, if there are any.
std::vector<Value> values_of_constants(const transformer::Decoder& decoder,
                                       const transformer::DecoderConstants& constants,
                                       const std::vector<const Node*>& mixtures,
                                       const std::vector<Node>& nodes);

// A weight's blocks where the file is mapped; without a handle if kernels do not read them there. A
// CPU's do, and those of a GPU that shares the host's memory if Vulkan's driver takes it. Not with
// OpenCL, whose drivers may silently copy memory that they are told to use in place.
Buffer in_place(Context& context, const Value& blocks);

// Weights are in place or copied, all else is copied. Throws GpuError; Error for a constant whose
// shape is not that of the decoder's.
PlacedConstants place_constants(Context& context, const transformer::Decoder& decoder,
                                const Node& node);

}  // namespace flownpu::gpu
