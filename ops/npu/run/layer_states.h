// SPDX-License-Identifier: Apache-2.0
// LayerStates: the mixers of a decoder's layers that keep a state, on the host, between the array's
// projections. They are the CPU device's steps of the operators that the graph has (the equations:
// ops/transformer/state_matcher.cc), in f32; states are tensors of the graph, which callers keep.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ops/device.h"
#include "ops/transformer/decoder.h"

namespace flownpu::npu {

class LayerStates {
 public:
  // How many of the last inputs of a node DecoderLayers are for states, see
  // FoundDecoder::state_inputs; 0: no layer keeps one.
  static std::size_t inputs(const transformer::Decoder& decoder);

  // Throws Error for constants that do not fit the decoder.
  LayerStates(const Node& node, const transformer::Decoder& decoder, const Device& host);
  ~LayerStates();
  LayerStates(const LayerStates&) = delete;
  LayerStates& operator=(const LayerStates&) = delete;

  // To be called when a run of `count` tokens begins: the last inputs and the last outputs of the
  // node's run. Throws Unsupported if the graph's mask hides one of the tokens.
  void begin(std::span<const Tensor> inputs, std::span<const Tensor> outputs, std::int64_t count);
  // mixed [rows][columns] = the mixer of the layer for its next rows, which moves its states on.
  // x [rows][D]: what the layer's projections read; projected [rows][..]: their products. Throws
  // Error if there is no such layer, or sizes are not the layer's.
  void mix(std::size_t layer, std::span<float> x, std::span<float> projected,
           std::span<float> mixed);
  // To be called when the run has succeeded: the outputs then have the states.
  void finish();

  // A layer's mixer; its states are moved by their owner.
  class Mixer;

 private:
  // A state: where the run's outputs want it, where it is, and memory for every second time.
  struct State {
    Tensor present;
    Tensor current;
    std::vector<float> other;

    // Where the next state is written, not over the current one.
    Tensor next();
  };
  struct StateLayer;

  std::vector<StateLayer> layers_;  // of all layers, those without states empty
};

}  // namespace flownpu::npu
