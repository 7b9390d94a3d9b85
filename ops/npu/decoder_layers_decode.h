// SPDX-License-Identifier: Apache-2.0
// DecodeCalls: a token through all layers and the LM head (aie/designs/decode_layer.py), in as few
// dispatches as the weights' offsets allow: one, for a model of up to 2 GB.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "ops/npu/compiled_designs.h"
#include "ops/npu/decoder_shape.h"

namespace flownpu::npu {

// What a decoder has on the device for as long as the session lives (decoder_shape.h).
struct DecoderBuffers {
  std::unique_ptr<Buffer> weights;
  std::unique_ptr<Buffer> vectors;
  std::unique_ptr<Buffer> rotary;
};

class DecodeCalls {
 public:
  // Throws DeviceError, kArtifact if the folder has no calls for a decoder of this shape.
  DecodeCalls(std::shared_ptr<CompiledDesigns> designs, const DecoderShape& shape);

  // Positions of a layer's cache and of a rotary table.
  std::int64_t context() const { return context_; }
  std::size_t dispatches() const { return dispatches_; }
  // What the calls need of the decoder's buffers; checked against the artifacts.
  void bind(const DecoderBuffers& buffers);

  // One token: `hidden` [D] at `position`, its keys and values appended to `cache`; `logits` [V],
  // or empty if they are not wanted. Throws DeviceFailed.
  void run(std::span<const float> hidden, std::int64_t position, Buffer& cache,
           std::span<float> logits);

 private:
  struct Part {
    PreparedCall call;
    std::int64_t first;
    std::int64_t layers;
    std::vector<View> arguments;
  };

  std::int64_t find_context() const;
  void find_parts();

  std::shared_ptr<CompiledDesigns> designs_;
  DecoderShape shape_;
  std::int64_t context_ = 0;
  std::size_t dispatches_ = 0;
  std::vector<Part> parts_;
  std::unique_ptr<Buffer> state_;
  std::unique_ptr<Buffer> logits_;
};

// What all calls of a decoder's layers have in common, as attributes in the artifacts' index.
CallAttributes layer_attributes(const DecoderShape& shape);

}  // namespace flownpu::npu
