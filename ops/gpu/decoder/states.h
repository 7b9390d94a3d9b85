// SPDX-License-Identifier: Apache-2.0
// The states of a sequence in a device's memory, for layers without attention. They are small
// beside what a run reads (20 MB beside 470 MB of weights in a model of 0.8B), so a run takes them
// out of the caller's tensors and leaves them there: callers keep, copy and rewind them without the
// device.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <vector>

#include "ops/gpu/context/context.h"
#include "ops/nodes/tensor.h"
#include "ops/transformer/decoder.h"

namespace flownpu::gpu {

class SequenceStates {
 public:
  // Throws GpuError.
  SequenceStates(Context& context, const transformer::Decoder& decoder);

  // Tensors of one sequence, those of all layers in their order (Decoder::states_of). Throws Error
  // for one of another size.
  void write(Context& context, std::span<const Tensor> tensors);
  void read(Context& context, std::span<const Tensor> tensors) const;

  // A layer's state before some tokens, and room for the one behind them; advance() makes this the
  // next tokens' state before.
  const Buffer* before(std::size_t layer, std::size_t state) const;
  const Buffer* behind(std::size_t layer, std::size_t state) const;
  void advance(std::size_t layer);

 private:
  using Pair = std::array<Buffer, 2>;
  struct States {
    std::vector<Pair> pairs;
    std::size_t current = 0;
  };

  std::vector<States> layers_;
};

}  // namespace flownpu::gpu
