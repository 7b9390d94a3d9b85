// SPDX-License-Identifier: Apache-2.0
// ForwardPass: a decoder's layers and its LM head on a device. Its kernels are compiled and its
// buffers allocated once; a call launches kernels on one queue and waits for nothing.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "ops/device.h"
#include "ops/gpu/context/context.h"
#include "ops/gpu/context/tuner.h"
#include "ops/gpu/decoder/cache_memory.h"
#include "ops/gpu/decoder/constants.h"
#include "ops/gpu/decoder/states.h"
#include "ops/gpu/decoder/stored_type.h"
#include "ops/gpu/kernels/kernels.h"
#include "ops/gpu/kernels/states/kernels.h"
#include "ops/gpu/operators/experts/mixture.h"
#include "ops/nodes/tensor.h"
#include "ops/shared_buffers.h"
#include "ops/transformer/decoder.h"

namespace flownpu::gpu {

// Where the rows of a paged cache are: row i of a sequence's page j is row pages[sequence, j] x
// `rows` + i of the cache.
struct Pages {
  Buffer table;  // int32 [sequences, columns]
  std::int64_t columns = 0;
  std::int64_t rows = 0;
};

// Tokens of one sequence, computed together with those of others: rows first .. first + count - 1
// of the hidden states, at positions from `past` on.
struct Segment {
  std::int64_t first = 0;
  std::int64_t count = 0;
  std::int64_t past = 0;
  DeviceCacheMemory* cache = nullptr;
  // Whether some tokens are in a block, whose tokens see one another (write_ends).
  bool has_blocks = false;
  SequenceStates* states = nullptr;  // null: all layers have attention
  // The first token's row of rotary tables, less `past` (SequenceTokens::shift).
  std::int64_t shift = 0;
  // If the cache is paged, else null; and the sequence's row of them.
  const Pages* pages = nullptr;
  std::int64_t sequence = 0;
};

// The kernels' types, storages and measurements beside the decoder.
struct PassOptions {
  DataType cache = DataType::kFloat32;  // the type of keys and values
  Activations activations = Activations::kInt8;
  GpuDtype dtype = GpuDtype::kAuto;
  GpuWeights weights = GpuWeights::kAuto;
  GpuMatrices matrices = GpuMatrices::kAuto;
  bool paged = false;  // caches are in pages
};

class ForwardPass {
 public:
  // The most tokens that are computed at once, for which weights are read once. With 256 that is 2
  // x 256 operations for the 0.56 to 0.63 bytes of a weight: more than any integrated GPU computes
  // while it reads these (a Radeon 780M computes some 230 int8 operations a byte: 16.6 Tops at 73
  // GB/s).
  static constexpr std::int64_t kMostTokens = 256;

  // `constants` must outlive it. Throws GpuError; Error for sizes that a kernel does not
  // support, and for options that the device does not.
  ForwardPass(std::shared_ptr<Context> context, const transformer::Decoder& decoder,
              const PlacedConstants& constants, const PassOptions& options);

  // kMostTokens, or the decoder's positions if they are fewer.
  static std::int64_t most_tokens(const transformer::Decoder& decoder);
  // The same, or what make_room() made it.
  std::int64_t most_tokens() const { return room_; }
  // Has at least so many tokens computed at once from now on: those of a block that see one another
  // (an image's) need the keys of all of them in each layer. Throws GpuError; Unsupported, with
  // nothing changed, where there is no memory for their activations, and for more than kMostTokens
  // where rotary tables are not by position.
  void make_room(std::int64_t tokens);
  // Kernels for one token of one sequence whose attention is not cut into parts.
  static std::int64_t dispatches_of(const transformer::Decoder& decoder);
  // Bytes of the buffers that a pass of this decoder allocates for its activations.
  static std::int64_t activation_bytes(const transformer::Decoder& decoder,
                                       const StoredType& stored);

  // Writes hidden states [count, hidden] to the rows from `first` on.
  void write_hidden(std::int64_t first, std::span<const float> rows);
  // Writes for each row from `first` on the number of tokens of its segment that it sees. For
  // segments with blocks.
  void write_ends(std::int64_t first, std::span<const std::int32_t> ends);
  // Writes rows of a rotary table that the graph makes, [count, columns] each, for the rows from
  // `first` on.
  void write_table(std::size_t table, std::int64_t first, std::span<const float> cosines,
                   std::span<const float> sines);
  // Runs all layers on the first `tokens` rows, which the segments divide among sequences.
  void run_layers(std::int64_t tokens, std::span<const Segment> segments);
  // Keeps row `token` of the last layer's output, from which the sequence's logits are computed.
  void keep_last(std::int64_t sequence, std::int64_t token);
  // Computes the logits of `count` sequences or tokens: from the rows of keep_last() if `kept`,
  // else from the first rows of the last run.
  void run_head(std::int64_t sequences, bool kept);
  // Waits for the kernels, and copies logits [count, vocabulary], from row `first` on.
  void read_logits(std::span<float> logits, std::int64_t first = 0);

 private:
  // A kernel for several tokens, which may be one of matrix units.
  struct PromptKernel {
    std::shared_ptr<const CompiledKernel> kernel = nullptr;
    bool in_matrices = false;
  };
  struct CompiledProduct {
    ProductShape shape;  // of one token
    const Buffer* weight = nullptr;
    const Buffer* bias = nullptr;  // if the shape has one
    Buffer image;                  // of the weight, if kernels read it so

    const Buffer* held_in(Storage storage) const {
      return storage == Storage::kImage ? &image : weight;
    }
    const Buffer* held() const { return held_in(shape.storage); }
    std::shared_ptr<const CompiledKernel> fused;  // of one token
    // For several tokens: `many` alone, or if they are rounded the two others.
    std::shared_ptr<const CompiledKernel> many;
    std::shared_ptr<const CompiledKernel> quantize;
    PromptKernel rounded;
  };
  // Kernels of a layer's mixer beside attention's own; null where it has no such kernel.
  struct LayerMixer {
    std::shared_ptr<const CompiledKernel> convolution;
    std::shared_ptr<const CompiledKernel> rates;
    std::shared_ptr<const CompiledKernel> delta;
    std::shared_ptr<const CompiledKernel> pairs;  // of prompts: these two
    std::shared_ptr<const CompiledKernel> chunks;
    std::shared_ptr<const CompiledKernel> gate;
  };
  struct LayerProducts {
    LayerMixer mixer;
    std::size_t attention;  // its number among the layers with attention
    CompiledProduct qkv;
    CompiledProduct gates;
    CompiledProduct output;
    CompiledProduct gate_up;
    CompiledProduct down;
    std::optional<Mixture> experts;  // in the place of these two
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
    kGates,
    kConvolved,
    kDecays,
    kShares,
    kPairs,
    kMixed,
    kActivations,
  };

  // Keys of a part of a token's attention: two chunks of a work-group of 256 lanes, compared with
  // which merging the parts takes little.
  static constexpr std::int64_t kKeysOfPart = 128;
  // The most parts. Each part is a work-group for every KV head. The number of parts gives a
  // compute unit four work-groups, so that some compute while others wait for memory.
  static constexpr std::int64_t kMostParts = 64;
  static constexpr std::int64_t kGroupsOfUnit = 4;
  // Tokens before those of a prompt's attention that is measured.
  static constexpr std::int64_t kPastOfMeasured = 1024;

  static std::array<Lifetime, kActivations> lifetimes(const transformer::Decoder& decoder,
                                                      const StoredType& stored,
                                                      std::int64_t tokens);
  std::vector<Buffer> allocated(const SharedBuffers& shared);
  std::shared_ptr<const CompiledKernel> compile(const KernelDescription& kernel);
  // `shape`: of several tokens; `of_token`: of one.
  CompiledProduct compile_product(const ProductShape& shape, const ProductShape& of_token,
                                  const Weight& weight, const Buffer* bias = nullptr);
  LayerProducts compile_layer(std::size_t layer);
  static DeltaShape delta_shape(const transformer::GatedDelta& delta);
  LayerMixer compile_mixer(const transformer::Layer& layer);
  static MixtureShape mixture_shape(const transformer::Decoder& decoder);
  Mixture compile_experts(const LayerConstants& constants);
  // Kernels of a layer for one token of one sequence.
  static std::int64_t kernels_of(const transformer::Decoder& decoder,
                                 const transformer::Layer& layer);
  std::vector<ProductShape> ways_of(const CompiledProduct& product) const;
  void tune(CompiledProduct& product);
  // The fastest of `ways` (ways_with_matrices). `describe` makes the kernel of a way, `launch`
  // launches it on as many tokens as are computed at once.
  PromptKernel fastest(const std::vector<bool>& ways,
                       const std::function<KernelDescription(bool)>& describe,
                       const std::function<void(const PromptKernel&)>& launch);
  void compile_rounded(CompiledProduct& product, const ProductShape& shape);
  AttentionShape attention_shape() const;
  void compile_attention();
  KernelDescription describe_prompt(const AttentionShape& shape, bool in_matrices) const;
  PromptKernel fastest_prompt();
  Activation other_residual() const { return residual_ == kResidual ? kOtherResidual : kResidual; }
  const Buffer* of(Activation activation) const { return &buffers_[shared_.buffer[activation]]; }

  void launch(const CompiledKernel& kernel, const Grid& grid,
              std::initializer_list<const Buffer*> buffers,
              std::initializer_list<std::int64_t> parameters = {});
  void launch(const CompiledKernel& kernel, const Grid& grid,
              std::span<const Buffer* const> buffers, std::span<const std::int64_t> parameters);
  // One token: with attention five kernels a layer, of which each needs what the one before it
  // wrote. With fewer, the work-groups of a kernel would have to wait for one another, which
  // neither API promises.
  void run_token(const Segment& segment);
  void normalise_token(std::size_t layer);
  // The norm's result of the residual stream, to which nothing is added.
  void normalise(const Buffer& weight, std::int64_t tokens);
  // The gated product and down, or experts, added to the residual stream.
  void feed_forward_token(const LayerProducts& layer, const EntryNorms& norms);
  // The first projection of the normalised rows, and that of gates where there are any.
  void multiply_first(const LayerProducts& layer, std::int64_t tokens);
  // y = the product with the normalised residual stream, to which the update is added first if
  // there is one that the last product did not add itself.
  void multiply_residual(const CompiledProduct& product, const EntryNorms& norms, const Buffer* y);
  // Adds the product to the residual stream, or with post-norms writes it as the update.
  void multiply_into_residual(const CompiledProduct& product, const Buffer* x);
  void multiply(const CompiledProduct& product, std::int64_t tokens, const Buffer* x,
                const Buffer* y);
  // The part of a layer between its projections, which reads other tokens; returns where its result
  // is.
  Activation mix(std::size_t layer, std::int64_t tokens, std::span<const Segment> segments);
  void convolve(std::size_t layer, const Segment& segment, Activation into);
  void apply_delta(std::size_t layer, const transformer::GatedDelta& delta, const Segment& segment);
  // A layer's kind of attention, constants and rotary table, and a segment's keys and values.
  struct Attended {
    const transformer::Attention& kind;
    const LayerConstants& constants;
    const PlacedConstants::Rotary& rotary;
    const Buffer* keys;
    const Buffer* values;
    std::int64_t capacity;
  };
  Attended attended_by(std::size_t layer, const Segment& segment) const;
  static void add_pages(const Segment& segment, std::vector<const Buffer*>& buffers,
                        std::vector<std::int64_t>& parameters);
  void attend(std::size_t layer, std::span<const Segment> segments);
  void attend_prompt(std::size_t layer, const Segment& segment);
  void launch_prompt(const PromptKernel& kernel, std::int64_t tokens,
                     std::span<const Buffer* const> buffers,
                     std::span<const std::int64_t> parameters);
  // The row of a layer's rotary table that a segment's first token uses.
  static std::int64_t turn_of(const PlacedConstants::Rotary& rotary, const Segment& segment) {
    return rotary.by_position ? segment.past + segment.shift : segment.first;
  }
  // A single token's, which appends its key and value.
  void attend_token(std::size_t layer, const Segment& segment);
  // In how many parts a segment's keys are attended to; 1: all at once.
  std::int64_t parts_of(const transformer::Attention& kind, const Segment& segment) const;
  void enter(const EntryNorms& norms, std::int64_t tokens);

  std::shared_ptr<Context> context_;
  transformer::Decoder decoder_;
  const PlacedConstants& constants_;
  Element cache_;
  StoredType stored_;
  GpuWeights weights_;
  GpuMatrices matrices_;
  bool rounds_;
  Tuner tuner_;
  std::int64_t room_;  // tokens that buffers_ and experts_ have room for
  SharedBuffers shared_;
  std::vector<Buffer> buffers_;
  Buffer logits_;
  std::int64_t logits_rows_ = 0;
  HeadsShape heads_shape_;
  std::shared_ptr<const CompiledKernel> first_norm_;
  std::shared_ptr<const CompiledKernel> entry_norm_;
  std::shared_ptr<const CompiledKernel> append_;
  // All layers share these: windows are parameters.
  AttentionShape attention_shape_;
  AttentionShape tiles_shape_;                       // for prompts
  std::shared_ptr<const CompiledKernel> attention_;  // of one token
  std::shared_ptr<const CompiledKernel> attention_in_parts_;
  PromptKernel attention_of_prompt_;
  PromptKernel attention_of_blocks_;  // null unless the decoder has blocks
  std::shared_ptr<const CompiledKernel> merge_;
  std::vector<LayerProducts> layers_;
  MixtureMemory experts_;  // if layers have experts
  CompiledProduct head_;
  // Which of the two residual buffers has the current residual stream.
  Activation residual_ = kResidual;
  std::vector<KernelArgument> arguments_;
};

}  // namespace flownpu::gpu
