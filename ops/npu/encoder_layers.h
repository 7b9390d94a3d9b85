// SPDX-License-Identifier: Apache-2.0
// EncoderLayers: the step of the node of that name (encoder_layers_match.h). An image after the
// other goes through all layers, a call for each operator:
//
//   gemm (embedding) -> add_layer_norm (positions)
//   -> [ gemm (QKV) -> flow_qkv -> gemm (output) -> add_layer_norm
//        -> gemm (up, GELU) -> gemm (down) -> add_layer_norm ]
//   -> patch_pooling (and norm) -> gemm (projector)
//
// The host cuts pixels into patches and reads features; all between stays on the device. The last
// add_layer_norm of the layers makes what is pooled.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "ops/device.h"
#include "ops/npu/call_list.h"
#include "ops/npu/compiled_designs.h"
#include "ops/npu/encoder_calls.h"
#include "ops/npu/encoder_shape.h"

namespace flownpu::npu {

// A run of a session follows another: they share the array, and its buffers.
class EncoderLayers final : public Step {
 public:
  // Packs the node's constants into buffers of the device. Throws DeviceError: kArtifact if the
  // folder lacks a call for this encoder, kMemory.
  EncoderLayers(const Node& node, std::shared_ptr<CompiledDesigns> designs);

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override;
  // Throws DeviceFailed if the device is in an unknown state since this run or an earlier one.
  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> scratch) const override;
  // Of an image.
  std::int64_t multiply_adds() const override;

 private:
  void make_buffers(const std::vector<EncoderCall>& calls);
  void write_patches(const float* pixels) const;
  void read_features(float* features) const;

  EncoderShape shape_;
  std::shared_ptr<CompiledDesigns> designs_;
  std::map<std::string, std::unique_ptr<Buffer>, std::less<>> buffers_;
  mutable std::mutex mutex_;  // for what follows, and what the buffers hold
  mutable CallList calls_;
};

// "27 layers of an encoder in 194 dispatches an image". Throws DeviceError (kArtifact) if the
// designs lack a call for this encoder.
std::string describe_encoder(const EncoderShape& shape,
                             const std::shared_ptr<CompiledDesigns>& designs);

}  // namespace flownpu::npu
