// SPDX-License-Identifier: Apache-2.0
// LayerExperts: routers and experts of a decoder's layers on the host, which computes them in f32
// between dispatches (host_operators.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "ops/cpu/products/router.h"
#include "ops/device.h"
#include "ops/npu/run/host_operators.h"
#include "ops/transformer/decoder.h"

namespace flownpu::npu {

class LayerExperts {
 public:
  // How many of the last inputs of a node DecoderLayers are for experts: router, gate and up
  // projections, and down projections of each layer, as a Q4NXMoE has them; 0: there are no
  // experts.
  static std::size_t inputs(const transformer::Decoder& decoder);

  // `node`: DecoderLayers. `host`: prepares the layers' Q4NXMoE. Throws Error for constants that
  // do not fit the decoder.
  LayerExperts(const Node& node, const transformer::Decoder& decoder, const HostCompute& compute,
               const Device& host);

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
  const cpu::Kernels* kernels_;
  std::shared_ptr<cpu::ThreadPool> pool_;
  std::vector<std::unique_ptr<Step>> steps_;
  std::span<const Tensor> constants_;
  // Memory of a run, whose steps follow one another.
  mutable std::vector<std::byte> memory_;
  mutable std::vector<float> logits_;
};

}  // namespace flownpu::npu
