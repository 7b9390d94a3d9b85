// SPDX-License-Identifier: Apache-2.0
// ForwardPass: a decoder's layers and its LM head on a device. Its kernels are compiled and its
// buffers allocated once; a call launches kernels on one queue and waits for nothing.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <vector>

#include "ops/device.h"
#include "ops/gpu/decoder/cache_memory.h"
#include "ops/gpu/decoder/constants.h"
#include "ops/gpu/decoder/shared_buffers.h"
#include "ops/gpu/decoder/stored_type.h"
#include "ops/gpu/kernels/kernels.h"
#include "ops/gpu/opencl/context.h"
#include "ops/gpu/opencl/tuner.h"
#include "ops/layers/decoder_sizes.h"
#include "ops/nodes/tensor.h"

namespace flownpu::gpu {

// Tokens of one sequence that are computed with others': rows first .. first + count - 1 of the
// hidden states, at positions from `past` on.
struct Segment {
  std::int64_t first = 0;
  std::int64_t count = 0;
  std::int64_t past = 0;
  DeviceCacheMemory* cache = nullptr;
  // Some of them are in a block, whose tokens see one another (write_ends).
  bool has_blocks = false;
};

// How its kernels compute, beside the decoder's sizes.
struct PassOptions {
  DataType cache = DataType::kFloat32;  // the type of keys and values
  Activations activations = Activations::kInt8;
  GpuDtype dtype = GpuDtype::kAuto;
  GpuWeights weights = GpuWeights::kAuto;
};

class ForwardPass {
 public:
  // Tokens that are computed at once. Weights are read once for them: at 256 that is 2 x 256
  // operations for the 0.56 to 0.63 bytes of a weight, above what any integrated GPU computes while
  // it reads a byte (a Radeon 780M some 230 int8 operations: 16.6 Tops at 73 GB/s).
  static constexpr std::int64_t kMostTokens = 256;

  // `constants` must outlive it. Throws OpenClError; Error for sizes that a kernel has no place
  // for, and for options that the device has none for.
  ForwardPass(std::shared_ptr<Context> context, const layers::DecoderSizes& sizes,
              const PlacedConstants& constants, const PassOptions& options);

  // How many tokens that is for a decoder with few positions.
  static std::int64_t most_tokens(const layers::DecoderSizes& sizes);
  std::int64_t most_tokens() const { return most_tokens(sizes_); }
  // Kernels of one token of one sequence.
  static std::int64_t dispatches_of(const layers::DecoderSizes& sizes);
  // Bytes of the buffers that a pass of these sizes has for its activations.
  static std::int64_t activation_bytes(const layers::DecoderSizes& sizes, const StoredType& stored);

  // Writes hidden states, rows of `hidden` numbers, from row `first` on.
  void write_hidden(std::int64_t first, std::span<const float> rows);
  // How many of its segment's tokens each of these sees, from row `first` on; of segments that have
  // blocks.
  void write_ends(std::int64_t first, std::span<const std::int32_t> ends);
  // All layers of so many tokens, in segments.
  void run_layers(std::int64_t tokens, std::span<const Segment> segments);
  // Keeps a token of the last layers as the one that a sequence's logits are of.
  void keep_last(std::int64_t sequence, std::int64_t token);
  // Logits of as many sequences; `kept`: of the tokens that were kept, else of those that ran last.
  void run_head(std::int64_t sequences, bool kept);
  // Waits, and reads them.
  void read_logits(std::span<float> logits);

 private:
  struct CompiledProduct {
    ProductShape shape;
    const Buffer* weight = nullptr;
    Buffer image;  // of the weight, if that is what kernels read

    const Buffer* held_in(Storage storage) const {
      return storage == Storage::kImage ? &image : weight;
    }
    const Buffer* held() const { return held_in(shape.storage); }
    std::shared_ptr<const CompiledKernel> fused;
    std::shared_ptr<const CompiledKernel> quantize;
    std::shared_ptr<const CompiledKernel> rounded;
  };
  struct Layer {
    CompiledProduct qkv;
    CompiledProduct output;
    CompiledProduct gate_up;
    CompiledProduct down;
  };
  enum Activation : std::uint8_t {
    kResidual,
    kOtherResidual,
    kNormalised,
    kPacked,
    kQuery,
    kAttended,
    kUpdate,
    kGated,
    kCodes,
    kScales,
    kSums,
    kLast,
    kEnds,
    kPartSums,
    kPartStates,
    kActivations,
  };

  // Keys of a part of a token's attention: two sweeps of a work-group's lanes, beside which to
  // merge the parts is little.
  static constexpr std::int64_t kKeysOfPart = 128;
  // The most parts, work-groups for each KV head: as many as leave a compute unit four to choose
  // from while others wait for memory.
  static constexpr std::int64_t kMostParts = 64;
  static constexpr std::int64_t kGroupsOfUnit = 4;

  static std::array<Lifetime, kActivations> lifetimes(const layers::DecoderSizes& sizes,
                                                      const StoredType& stored);
  std::shared_ptr<const CompiledKernel> compile(const KernelDescription& kernel);
  CompiledProduct compile_product(const ProductShape& shape, const Weight& weight);
  std::vector<ProductShape> ways_of(const CompiledProduct& product) const;
  void tune(CompiledProduct& product);
  AttentionShape attention_shape() const;
  void compile_attention();
  const Buffer* of(Activation activation) const { return &buffers_[shared_.buffer[activation]]; }

  void launch(const CompiledKernel& kernel, const Grid& grid,
              std::initializer_list<const Buffer*> buffers,
              std::initializer_list<std::int64_t> parameters = {});
  void multiply(const CompiledProduct& product, std::int64_t tokens, const Buffer* x,
                const Buffer* y);
  void attend(std::size_t layer, std::span<const Segment> segments);
  void attend(const layers::LayerKind& kind, const Segment& segment, const Buffer* keys,
              const Buffer* values);
  // In how many parts the keys of a segment are; 1: it is not cut.
  std::int64_t parts_of(const layers::LayerKind& kind, const Segment& segment) const;
  void enter(const EntryNorms& norms, std::int64_t tokens);

  std::shared_ptr<Context> context_;
  layers::DecoderSizes sizes_;
  const PlacedConstants& constants_;
  Element cache_;
  StoredType stored_;
  GpuWeights weights_;
  bool rounds_;
  Tuner tuner_;
  SharedBuffers shared_;
  std::vector<Buffer> buffers_;
  Buffer logits_;
  std::int64_t logits_rows_ = 0;
  HeadsShape heads_shape_;
  std::shared_ptr<const CompiledKernel> first_norm_;
  std::shared_ptr<const CompiledKernel> entry_norm_;
  std::shared_ptr<const CompiledKernel> append_;
  // What all layers attend with: their windows are parameters.
  AttentionShape attention_shape_;
  AttentionShape tiles_shape_;  // of prompts
  std::shared_ptr<const CompiledKernel> attention_;
  std::shared_ptr<const CompiledKernel> attention_in_tiles_;
  std::shared_ptr<const CompiledKernel> attention_of_blocks_;  // null without any
  std::shared_ptr<const CompiledKernel> attention_in_parts_;
  std::shared_ptr<const CompiledKernel> merge_;
  std::vector<Layer> layers_;
  CompiledProduct head_;
  // Which of the two residual streams is the last.
  Activation residual_ = kResidual;
  std::vector<KernelArgument> arguments_;
};

}  // namespace flownpu::gpu
