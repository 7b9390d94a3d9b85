// SPDX-License-Identifier: Apache-2.0
// DecoderStep: the step of the node DecoderLayers. Sequences of a batch are computed together, row
// by row, each with a KV cache of its own in the device's memory, or all with one that is paged;
// prompts go in chunks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ops/device.h"
#include "ops/gpu/context/context.h"
#include "ops/gpu/decoder/constants.h"
#include "ops/gpu/decoder/forward_pass.h"
#include "ops/gpu/decoder/paged_caches.h"
#include "ops/gpu/decoder/states.h"
#include "ops/transformer/cache/kv_caches.h"
#include "ops/transformer/decoder_call.h"

namespace flownpu::gpu {

class DecoderStep final : public Step {
 public:
  // Moves the constants to the device, compiles its kernels and allocates its activations. Throws
  // GpuError; Error for a node that is not as constants.h says.
  DecoderStep(const Node& node, std::shared_ptr<Context> context, const DeviceOptions& options);

  // Throws Unsupported for more sequences than can be computed at once.
  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override;
  // Throws GpuError; Unsupported for a cache, or a block, that there is no memory for.
  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> scratch) const override;
  std::int64_t multiply_adds() const override { return decoder_.multiply_adds(); }

  // The caches of conversations; null if they are paged.
  const std::shared_ptr<transformer::KvCaches>& caches() const { return caches_; }
  const std::shared_ptr<PagedCaches>& paged() const { return paged_; }

 private:
  struct Sequence {
    transformer::SequenceTokens tokens;
    std::int64_t row = 0;  // of the hidden states, that of its first token
    DeviceCacheMemory* memory = nullptr;
    std::shared_ptr<transformer::KvCache> cache =
        nullptr;                                // that has the memory, unless it is paged
    std::span<const std::int32_t> blocks = {};  // of each new token, or empty
  };

  // The block numbers of a sequence's new tokens, without padding; empty for a single token.
  std::span<const std::int32_t> blocks_of(std::span<const Tensor> inputs, std::int64_t sequence,
                                          std::int64_t count) const;
  void make_room(std::span<const Tensor> inputs) const;
  // How many of the tokens from `token` on go into a chunk with room for `most` without cutting a
  // block.
  static std::int64_t some_of(const Sequence& sequence, std::int64_t token, std::int64_t most);

  // The tokens of the first sequence, for messages.
  transformer::SequenceTokens first_tokens(std::span<const Tensor> inputs) const;
  std::vector<Sequence> begin(std::span<const Tensor> inputs,
                              std::span<const Tensor> outputs) const;
  std::vector<Sequence> begin_paged(std::span<const Tensor> inputs,
                                    std::span<const Tensor> outputs) const;
  // `logits`: written here if they are those of all tokens, else only computed.
  void compute(std::span<const Tensor> inputs, std::span<const Sequence> sequences,
               const Tensor& logits) const;
  // Writes the rows of tables that the graph makes for a segment.
  void write_tables(std::span<const Tensor> inputs, const Segment& segment) const;
  // Takes the logits of a segment's tokens to their place.
  void read_all_logits(const Segment& segment, std::int64_t place, const Tensor& logits) const;
  void finish(std::span<const Sequence> sequences, std::span<const Tensor> outputs) const;
  // Takes the states of all sequences to the device, and back.
  void begin_states(std::span<const Tensor> inputs, std::span<const Sequence> sequences) const;
  void finish_states(std::span<const Tensor> outputs, std::size_t sequences) const;
  std::vector<Tensor> parts_of(std::span<const Tensor> tensors, std::int64_t sequence) const;

  transformer::Decoder decoder_;
  std::shared_ptr<Context> context_;
  PlacedConstants constants_;
  // Under the context's mutex: the pass, and states by sequence.
  mutable ForwardPass pass_;
  mutable std::vector<SequenceStates> states_;
  std::shared_ptr<transformer::KvCaches> caches_;
  std::shared_ptr<PagedCaches> paged_;
};

// "26 layers and the LM head in 210 kernels a token, ...": the text in the placement line about a
// node that lower_decoder() made. Throws Error if weights and activations do not fit the device's
// memory, and what choose_stored_type() throws. Locks the context's mutex.
std::string describe_decoder(const Node& node, Context& context, GpuDtype dtype);

}  // namespace flownpu::gpu
