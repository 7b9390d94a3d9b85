// SPDX-License-Identifier: Apache-2.0
// DecoderLayers: the step of the node of that name (match/layers.h). A prompt, except its last
// token, goes through the programs for prefill in chunks; that token, and each token of a reply,
// goes through the program for decode, which ends with the LM head. Tokens that see one another in
// both directions go through the program for a block of exactly their number, uncut, at any
// position. If the last token is among them, it goes through both programs, because it only sees
// earlier positions. If logits of all tokens are wanted, a chunk's program ends with the last norm,
// and the host multiplies its rows by the LM head, whose blocks lie among the array's weights;
// chunks whose program ends before are not used. The device keeps the KV caches
// (ops/transformer/cache/kv_caches.h), the activations and the weights.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "ops/device.h"
#include "ops/npu/artifacts/compiled_designs.h"
#include "ops/npu/nodes/decoder_shape.h"
#include "ops/npu/run/layer_experts.h"
#include "ops/npu/run/layer_states.h"
#include "ops/npu/run/program.h"
#include "ops/transformer/cache/kv_caches.h"
#include "ops/transformer/decoder_call.h"

namespace flownpu::npu {

// A decoder's programs that share a cache, for the longest context that has programs.
struct DecoderPrograms {
  const ProgramRecord* decode = nullptr;
  std::vector<const ProgramRecord*> prefill;  // the shortest chunk first; may be none
  std::vector<const ProgramRecord*> blocks;   // the smallest block first; may be none

  // Throws DeviceError (kArtifact) if there are none for the model of this node. If it has logits
  // of all tokens, chunks and blocks are those whose programs make the rows for the LM head.
  static DecoderPrograms find(const Artifacts& artifacts, const Node& node);
  std::vector<const ProgramRecord*> all() const;
};

// A session's runs follow one another, since they share the array and its buffers.
class DecoderLayers final : public Step {
 public:
  // Packs the node's constants into buffers of the device. Throws DeviceError: kArtifact if the
  // folder has no programs for this decoder, kMemory. `host`: what computes the host's steps, with
  // experts in `context`; `host_device`: the LM head of chunks, and mixers with states.
  DecoderLayers(const Node& node, std::shared_ptr<CompiledDesigns> designs, HostCompute host,
                const cpu::Context& context, const Device& host_device);

  // Throws Unsupported for more than one sequence, more tokens than the artifacts were built for,
  // or a block for whose size there is no program.
  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override;
  // Throws DeviceFailed if this run or an earlier one left the device in an unknown state;
  // Unsupported if there is no memory for another conversation's cache.
  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> scratch) const override;
  std::int64_t multiply_adds() const override { return shape_.multiply_adds(); }

  // Shared with the readers of the keys and values for which callers' tensors stand.
  const std::shared_ptr<transformer::KvCaches>& caches() const { return caches_; }

 private:
  // The tokens of a run. `blocks`: each new token's block number, or empty.
  struct Tokens : transformer::SequenceTokens {
    std::span<const std::int32_t> blocks;

    // How many tokens from a new one on are in its block; 1 if it is in none.
    std::int64_t block(std::int64_t token) const;
  };

  Tokens tokens_of(std::span<const Tensor> inputs) const;
  void check_blocks(const Tokens& tokens) const;
  // The tokens that are computed together: a block, a chunk that ends before the next block, or a
  // single token.
  struct ProgramRun {
    Program* program;
    std::int64_t count;
  };
  ProgramRun run_at(const Tokens& tokens, std::int64_t token) const;
  void compute(const Tensor& hidden, const Tokens& tokens, Buffer& cache,
               std::span<float> logits) const;
  // K of the LM head's packed weight.
  std::int64_t head_columns() const;
  // The LM head of what a chunk's program made for its first tokens, as many as there are rows of
  // logits.
  void multiply_head(const Program& chunk, std::span<float> logits) const;
  // Moves the rows of the rotary tables, from this one on, to the array.
  void turn_from(std::int64_t row) const;
  // Moves the rows that the tokens have in given tables to the array.
  void take_rows(std::span<const Tensor> tables, const Tokens& tokens) const;

  DecoderShape shape_;
  std::shared_ptr<CompiledDesigns> designs_;
  DecoderPrograms programs_;
  ProgramBuffers buffers_;
  std::shared_ptr<transformer::KvCaches> caches_;
  std::shared_ptr<LayerExperts> experts_;  // null: the feed-forwards are dense
  std::shared_ptr<LayerStates> states_;    // null: all layers have attention
  // With position_ids, all rows of the rotary tables; otherwise empty.
  std::vector<std::byte> rotary_;
  // The LM head and its weight; null: logits of the last token alone.
  std::unique_ptr<Step> head_;
  Tensor head_blocks_;
  mutable std::mutex mutex_;            // guards what follows
  mutable std::int64_t first_row_ = 0;  // of the rotary tables that the array has
  mutable Program decode_;
  mutable std::vector<Program> prefill_;
  mutable std::vector<Program> blocks_;
};

// "6 layers and the LM head in 1 dispatch a token": the text in the placement line about a node
// DecoderLayers. Throws DeviceError (kArtifact) if the designs have no programs for this decoder,
// or one of their files is damaged.
std::string describe_decoder(const Node& node, const CompiledDesigns& designs);

}  // namespace flownpu::npu
