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
  // Throws Error for constants that do not fit the decoder.
  LayerStates(const Node& node, const transformer::Decoder& decoder, const Device& host);
  ~LayerStates();
  LayerStates(const LayerStates&) = delete;
  LayerStates& operator=(const LayerStates&) = delete;

  // To be called when a run of `count` tokens begins: the last inputs and the last outputs of the
  // node's run. Throws Unsupported if the graph's mask hides one of the tokens.
  void begin(std::span<const Tensor> inputs, std::span<const Tensor> outputs, std::int64_t count);
  // A layer's next rows: x [count][D], what its projections read; projected [count][..], their
  // products; mixed [count][columns], what its output projection reads. Empty: not used.
  struct Rows {
    std::int64_t count;
    std::span<float> x, projected, mixed;
  };
  // Makes `mixed`, and moves the layer's states on. Throws Error if there is no such layer, or
  // sizes are not the layer's.
  void mix(std::size_t layer, const Rows& given);
  // The same in two parts, between which an array applies a gated delta rule
  // (aie/designs/gated_delta.py). The first gives x of that design in bf16, [tokens][heads][line],
  // and the states before it; tokens behind the rows change nothing. The second takes the states
  // behind the tokens, and what the rule made of them, `delta` [count][columns].
  void before_delta(std::size_t layer, const Rows& given, std::span<std::uint16_t> tokens,
                    std::size_t line, std::span<std::uint16_t> states);
  void after_delta(std::size_t layer, const Rows& given, std::span<float> delta,
                   std::span<const std::uint16_t> states);
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

  // Throws Error unless the layer keeps a state and has rows of these sizes.
  StateLayer& checked(std::size_t layer, const Rows& given);

  std::vector<StateLayer> layers_;  // of all layers, those without states empty
};

}  // namespace flownpu::npu
