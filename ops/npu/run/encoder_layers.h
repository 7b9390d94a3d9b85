// SPDX-License-Identifier: Apache-2.0
// EncoderLayers: the step of the node of that name (match/encoder_layers.h). Images go through the
// program for encoding one after the other. The host cuts pixels into patches and reads the
// features; everything in between stays on the device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "ops/device.h"
#include "ops/npu/artifacts/compiled_designs.h"
#include "ops/npu/nodes/encoder_shape.h"
#include "ops/npu/run/program.h"

namespace flownpu::npu {

// A session's runs follow one another, since they share the array and its buffers.
class EncoderLayers final : public Step {
 public:
  // Packs the node's constants into buffers of the device. Throws DeviceError: kArtifact if the
  // folder has no program for this encoder, kMemory.
  EncoderLayers(const Node& node, std::shared_ptr<CompiledDesigns> designs,
                const HostCompute& host);

  // Throws Error for pixels of another shape than [images, channels, side, side].
  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override;
  // Throws DeviceFailed if this run or an earlier one left the device in an unknown state.
  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> scratch) const override;
  // Multiply-adds for one image.
  std::int64_t multiply_adds() const override;

 private:
  EncoderShape shape_;
  std::shared_ptr<CompiledDesigns> designs_;
  const ProgramRecord* record_;
  ProgramBuffers buffers_;
  mutable std::mutex mutex_;  // guards program_
  mutable Program program_;
};

// "an encoder's 27 layers in 194 dispatches an image": the text in the placement line about a node
// EncoderLayers. Throws DeviceError (kArtifact) if the designs have no program for this encoder, or
// one of its files is damaged.
std::string describe_encoder(const Node& node, const CompiledDesigns& designs);

}  // namespace flownpu::npu
