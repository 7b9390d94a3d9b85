// SPDX-License-Identifier: Apache-2.0
// DecoderLayers: the step of the node of that name (decoder_layers_match.h). Prompts go through the
// prefill calls in chunks, all but their last token; that one, and each token of a reply, goes
// through the decode calls, which end with the LM head. Keys and values stay in KV caches of the
// device's (kv_cache.h); activations and weights stay there, too.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>

#include "ops/device.h"
#include "ops/npu/compiled_designs.h"
#include "ops/npu/decoder_layers_decode.h"
#include "ops/npu/decoder_layers_prefill.h"
#include "ops/npu/decoder_shape.h"
#include "ops/npu/kv_cache.h"

namespace flownpu::npu {

// A run of a session follows another: they share the array, and its buffers.
class DecoderLayers final : public Step {
 public:
  // Packs the node's constants into buffers of the device. Throws DeviceError: kArtifact if the
  // folder has no calls for this decoder, kMemory.
  DecoderLayers(const Node& node, std::shared_ptr<CompiledDesigns> designs);

  // Throws Unsupported for more than one sequence, or more tokens than the artifacts were built
  // for.
  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override;
  // Throws DeviceFailed if the device is in an unknown state since this run or an earlier one.
  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> scratch) const override;
  std::int64_t multiply_adds() const override;

  // Lives as long as someone needs what callers' tensors stand for.
  const std::shared_ptr<KvCaches>& caches() const { return caches_; }

 private:
  // Tokens of a run: `past` before it, `count` new ones, of `given` (a prompt may be padded on the
  // right).
  struct Tokens {
    std::int64_t past;
    std::int64_t count;
    std::int64_t given;
  };

  Tokens tokens_of(std::span<const Tensor> inputs) const;
  void compute(const Tensor& hidden, const Tokens& tokens, Buffer& cache,
               std::span<float> logits) const;

  DecoderShape shape_;
  std::shared_ptr<CompiledDesigns> designs_;
  DecoderBuffers buffers_;
  std::shared_ptr<KvCaches> caches_;
  mutable std::mutex mutex_;  // for what follows
  mutable DecodeCalls decode_;
  mutable PrefillCalls prefill_;
};

// "6 layers and the LM head in 1 dispatch a token". Throws DeviceError (kArtifact) if the designs
// have no calls for this decoder.
std::string describe_decoder(const DecoderShape& shape,
                             const std::shared_ptr<CompiledDesigns>& designs);

}  // namespace flownpu::npu
