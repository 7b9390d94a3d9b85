// SPDX-License-Identifier: Apache-2.0
// DecoderLayers: the step of the node of that name (match/layers.h). Prompts go through the
// programs for prefill in chunks, all but their last token; that one, and each token of a reply,
// goes through the program for decode, which ends with the LM head. Tokens that see one another in
// both directions go through the program for a block of as many, whole, wherever it begins; a last
// token among them goes through both, as all that it sees comes before it. Keys and values stay in
// KV caches of the device's (ops/layers/kv_caches.h); activations and weights stay there, too.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "ops/device.h"
#include "ops/layers/decoder_call.h"
#include "ops/layers/kv_caches.h"
#include "ops/npu/artifacts/compiled_designs.h"
#include "ops/npu/nodes/decoder_shape.h"
#include "ops/npu/run/program.h"

namespace flownpu::npu {

// Programs of one decoder that share a cache: those for the longest context that there is.
struct DecoderPrograms {
  const ProgramRecord* decode = nullptr;
  std::vector<const ProgramRecord*> prefill;  // the shortest chunk first; may be none
  std::vector<const ProgramRecord*> blocks;   // the same

  // Throws DeviceError (kArtifact) if there are none for the model of this node.
  static DecoderPrograms find(const Artifacts& artifacts, const Node& node);
  std::vector<const ProgramRecord*> all() const;
};

// A run of a session follows another: they share the array, and its buffers.
class DecoderLayers final : public Step {
 public:
  // Packs the node's constants into buffers of the device. Throws DeviceError: kArtifact if the
  // folder has no programs for this decoder, kMemory.
  DecoderLayers(const Node& node, std::shared_ptr<CompiledDesigns> designs,
                const HostCompute& host);

  // Throws Unsupported for more than one sequence, more tokens than the artifacts were built for,
  // or a block of another size.
  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override;
  // Throws DeviceFailed if the device is in an unknown state since this run or an earlier one;
  // Unsupported if there is no memory for the cache of one more conversation.
  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> scratch) const override;
  std::int64_t multiply_adds() const override { return shape_.multiply_adds(); }

  // Lives as long as someone needs what callers' tensors stand for.
  const std::shared_ptr<layers::KvCaches>& caches() const { return caches_; }

 private:
  // Tokens of a run; `blocks`: the number of each new one's block, or empty.
  struct Tokens : layers::SequenceTokens {
    std::span<const std::int32_t> blocks;

    // From a new token on: those of its block, 1 in none.
    std::int64_t block(std::int64_t token) const;
  };

  Tokens tokens_of(std::span<const Tensor> inputs) const;
  void check_blocks(const Tokens& tokens) const;
  // What goes together from a new token on: a block, some before the next one, or one.
  struct Part {
    Program* program;
    std::int64_t count;
  };
  Part part_at(const Tokens& tokens, std::int64_t token) const;
  void compute(const Tensor& hidden, const Tokens& tokens, Buffer& cache,
               std::span<float> logits) const;

  DecoderShape shape_;
  std::shared_ptr<CompiledDesigns> designs_;
  DecoderPrograms programs_;
  ProgramBuffers buffers_;
  std::shared_ptr<layers::KvCaches> caches_;
  mutable std::mutex mutex_;  // for what follows
  mutable Program decode_;
  mutable std::vector<Program> prefill_;
  mutable std::vector<Program> blocks_;
};

// "6 layers and the LM head in 1 dispatch a token", of a node DecoderLayers. Throws DeviceError
// (kArtifact) if the designs have no programs for this decoder, or a file of them is damaged.
std::string describe_decoder(const Node& node, const CompiledDesigns& designs);

}  // namespace flownpu::npu
