// SPDX-License-Identifier: Apache-2.0
// LayerExperts: routers and experts of a decoder's layers on the host, which computes them in f32
// between dispatches (host_operators.h).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "ops/cpu/products/router.h"
#include "ops/cpu/step.h"
#include "ops/npu/nodes/decoder_shape.h"
#include "ops/npu/run/host_operators.h"

namespace flownpu::npu {

class LayerExperts {
 public:
  // How many of the last inputs of a node DecoderLayers are for experts: those of each layer's
  // Q4NXMoE behind X, from its router on, some absent; 0: there are no experts.
  static std::size_t inputs(const transformer::Decoder& decoder);

  // `node`: DecoderLayers. `packed`: all experts as the array reads them, if it does; the host then
  // reads the same memory, else, or if they have 8 bits, the graph's. Throws Error for constants
  // that do not fit the decoder.
  LayerExperts(const Node& node, const DecoderShape& shape, const cpu::Context& context,
               std::span<const std::byte> packed);

  // To be called when a run begins: the last inputs of a node's run, whose data must outlive the
  // run.
  void use(std::span<const Tensor> constants) { constants_ = constants; }

  // Both throw Error if there is no such layer, or sizes are not the layer's.
  // answers [rows][hidden] = the experts' answers to x [rows][hidden], each times its share, added.
  void answer(std::size_t layer, std::span<float> x, std::span<float> answers) const;
  // The experts of x [hidden], and their shares.
  void route(std::size_t layer, std::span<const float> x, std::span<std::int32_t> chosen,
             std::span<float> shares) const;

 private:
  // The constants of a layer.
  std::span<const Tensor> constants_of(std::size_t layer, std::size_t elements) const;

  cpu::Router router_;
  cpu::Context context_;
  std::vector<std::unique_ptr<Step>> steps_;
  std::span<const Tensor> constants_;
  std::vector<std::array<Tensor, 2>> packed_;  // of each layer; no data: the graph's are read
  // Memory of a run, whose steps follow one another.
  mutable std::vector<std::byte> memory_;
  mutable std::vector<float> logits_;
};

}  // namespace flownpu::npu
