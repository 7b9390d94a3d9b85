// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/decoder/states.h"

#include "ops/error.h"
#include "ops/gpu/operators/run.h"

namespace flownpu::gpu {

SequenceStates::SequenceStates(Context& context, const transformer::Decoder& decoder) {
  for (const transformer::Layer& layer : decoder.layers) {
    States& made = layers_.emplace_back();
    for (const Shape& shape : decoder.states_of(layer)) {
      const auto bytes = static_cast<std::size_t>(shape.elements()) * sizeof(float);
      check_bytes(bytes, "a state");
      made.pairs.push_back({context.allocate(bytes), context.allocate(bytes)});
    }
  }
}

void SequenceStates::write(Context& context, std::span<const Tensor> tensors) {
  for (States& layer : layers_) {
    for (const Pair& pair : layer.pairs) {
      const Tensor& tensor = tensors.front();
      const Buffer& buffer = pair[layer.current];
      if (tensor.type != DataType::kFloat32 || tensor.bytes() != buffer.bytes())
        fail("expected a state of ", buffer.bytes() / sizeof(float), " floats, got ",
             name_of(tensor.type), " ", to_string(tensor.shape));
      context.write(buffer, {tensor.as<const std::byte>(), tensor.bytes()});
      tensors = tensors.subspan(1);
    }
  }
}

void SequenceStates::read(Context& context, std::span<const Tensor> tensors) const {
  for (const States& layer : layers_) {
    for (const Pair& pair : layer.pairs) {
      context.read(pair[layer.current], {tensors.front().as<std::byte>(), tensors.front().bytes()});
      tensors = tensors.subspan(1);
    }
  }
}

const Buffer* SequenceStates::before(std::size_t layer, std::size_t state) const {
  return &layers_[layer].pairs[state][layers_[layer].current];
}

const Buffer* SequenceStates::behind(std::size_t layer, std::size_t state) const {
  return &layers_[layer].pairs[state][1 - layers_[layer].current];
}

void SequenceStates::advance(std::size_t layer) {
  layers_[layer].current = 1 - layers_[layer].current;
}

}  // namespace flownpu::gpu
