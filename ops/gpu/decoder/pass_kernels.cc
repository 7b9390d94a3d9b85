// SPDX-License-Identifier: Apache-2.0
// ForwardPass's kernels: their shapes, their compilation, and the choice of a product's fastest
// way.
#include <algorithm>
#include <utility>

#include "ops/error.h"
#include "ops/gpu/decoder/forward_pass.h"
#include "ops/gpu/kernels/matrices/flow_attention.h"
#include "ops/gpu/kernels/matrices/q4nx_matmul.h"
#include "ops/gpu/language/generate.h"

namespace flownpu::gpu {
namespace {

Gating gating_of(const transformer::Decoder& decoder) {
  switch (decoder.feed_forward().activation) {
    case transformer::Activation::kGeGlu:
      return Gating::kGeGlu;
    case transformer::Activation::kSwiGlu:
      return Gating::kSwiGlu;
  }
  fail("expected a feed-forward with a gate");
}

}  // namespace

MixtureShape ForwardPass::mixture_shape(const transformer::Decoder& decoder) {
  const transformer::FeedForward& kind = decoder.feed_forward();
  return {.router = {.experts = kind.experts,
                     .per_row = kind.experts_per_token,
                     .hidden = decoder.hidden,
                     .normalizes = kind.normalized_experts},
          .inner = kind.size,
          .gating = gating_of(decoder),
          .alpha = kind.swiglu_alpha,
          .beta = kind.swiglu_beta,
          .limit = kind.swiglu_limit};
}

Mixture ForwardPass::compile_experts(const LayerConstants& constants) {
  return {*context_,
          mixture_shape(decoder_),
          constants.experts,
          {.rounds = rounds_, .matrices = matrices_, .activation = stored_.element}};
}

// The LM head does not normalise: it has many work-groups, each of which would do so.
ForwardPass::LayerProducts ForwardPass::compile_layer(std::size_t layer) {
  const LayerConstants& given = constants_.layers[layer];
  const transformer::Layer& own = decoder_.layers[layer];
  const std::int64_t gate = gate_rows(decoder_, own);
  const auto normalising = [&](ProductShape shape, bool adds) {
    shape.given = Element::kFloat32;
    shape.norm = {.columns = decoder_.hidden,
                  .epsilon = decoder_.epsilon,
                  .has_skip = adds,
                  .norms_skip = adds,
                  .writes_sum = adds};
    return shape;
  };
  const auto adding = [&](ProductShape shape) {
    shape.has_residual = !decoder_.post_norms();
    return shape;
  };
  const ProductShape qkv{.rows = decoder_.input_rows(own) - gate,
                         .columns = decoder_.hidden,
                         .has_bias = given.qkv_bias.handle() != nullptr};
  const ProductShape gates{.rows = gate, .columns = decoder_.hidden};
  const ProductShape output{.rows = decoder_.hidden,
                            .columns = decoder_.output_columns(own),
                            .factor = given.output.factor,
                            .has_bias = given.output_bias.handle() != nullptr,
                            .result = Element::kFloat32};
  const ProductShape gate_up{.rows = decoder_.feed_forward().size,
                             .columns = decoder_.hidden,
                             .gating = gating_of(decoder_),
                             .result = Element::kFloat32};
  const ProductShape down{.rows = decoder_.hidden,
                          .columns = decoder_.feed_forward().size,
                          .factor = given.down.factor,
                          .given = Element::kFloat32,
                          .result = Element::kFloat32};
  const bool adds = decoder_.post_norms();
  const bool has_experts = decoder_.feed_forward().experts > 0;
  const bool is_shared = gate > 0 || !own.has_attention();  // the normalised stream
  const auto before = std::span(decoder_.layers).first(layer);
  return {.mixer = compile_mixer(own),
          .attention = static_cast<std::size_t>(
              std::ranges::count_if(before, &transformer::Layer::has_attention)),
          .qkv = compile_product(qkv, is_shared ? qkv : normalising(qkv, adds && layer > 0),
                                 given.qkv, &given.qkv_bias),
          .gates = gate > 0 ? compile_product(gates, gates, given.gates) : CompiledProduct{},
          .output = compile_product(output, adding(output), given.output, &given.output_bias),
          .gate_up = has_experts
                         ? CompiledProduct{}
                         : compile_product(gate_up, normalising(gate_up, adds), given.gate_up),
          .down = has_experts ? CompiledProduct{} : compile_product(down, adding(down), given.down),
          .experts = has_experts ? std::optional(compile_experts(given)) : std::nullopt};
}

std::shared_ptr<const CompiledKernel> ForwardPass::compile(const KernelDescription& kernel) {
  return context_->compile(kernel, stored_.element);
}

ForwardPass::CompiledProduct ForwardPass::compile_product(const ProductShape& shape,
                                                          const ProductShape& of_token,
                                                          const Weight& weight,
                                                          const Buffer* bias) {
  CompiledProduct product{.shape = of_token,
                          .weight = &weight.blocks,
                          .bias = shape.has_bias ? bias : nullptr,
                          .image = {},
                          .fused = nullptr,
                          .many = nullptr,
                          .quantize = nullptr,
                          .rounded = {}};
  product.shape.layout = weight.layout;
  tune(product);
  ProductShape many = shape;
  many.layout = weight.layout;
  many.storage = product.shape.storage;
  many.teams = product.shape.teams;
  if (!rounds_) {
    product.many = compile(fused_dqp(many));
    return product;
  }
  product.quantize = compile(quantize_rows(shape.columns, shape.given));
  compile_rounded(product, many);
  return product;
}

ForwardPass::PromptKernel ForwardPass::fastest(
    const std::vector<bool>& ways, const std::function<KernelDescription(bool)>& describe,
    const std::function<void(const PromptKernel&)>& launch) {
  std::vector<PromptKernel> kernels(ways.size());
  const auto kernel_of = [&](std::size_t way) {
    if (kernels[way].kernel == nullptr)
      kernels[way] = {.kernel = compile(describe(ways[way])), .in_matrices = ways[way]};
    return kernels[way];
  };
  return kernel_of(tuner_.fastest(generate(describe(false), context_->dialect(), stored_.element),
                                  ways.size(), [&](std::size_t way) { launch(kernel_of(way)); }));
}

void ForwardPass::compile_rounded(CompiledProduct& product, const ProductShape& shape) {
  const std::vector<bool> ways = ways_with_matrices(matrices_, shape, *context_);
  Buffer written;
  if (tuner_.measures() && ways.size() > 1)
    written =
        context_->allocate(static_cast<std::size_t>(most_tokens() * shape.rows) * sizeof(float));
  std::vector<const Buffer*> buffers{of(kCodes), of(kScales), of(kSums), product.held(), &written};
  if (product.bias != nullptr) buffers.push_back(product.bias);
  const auto describe = [&](bool in_matrices) {
    return in_matrices ? q4nx_matmul_of_matrices(shape, context_->facts().matrix_units())
                       : q4nx_matmul(shape);
  };
  product.rounded = fastest(ways, describe, [&](const PromptKernel& way) {
    launch(*way.kernel,
           way.in_matrices ? q4nx_matmul_of_matrices_grid(shape, most_tokens())
                           : q4nx_matmul_grid(shape, most_tokens()),
           buffers, std::array{most_tokens()});
  });
}

// The ways to launch a product: numbers of teams, and storages of the weight. The rule's choice
// comes first. Another storage is tried only with the rule's number of teams, because the two are
// independent.
std::vector<ProductShape> ForwardPass::ways_of(const CompiledProduct& product) const {
  std::vector<ProductShape> ways;
  const DeviceFacts& facts = context_->facts();
  const std::vector<std::int64_t> teams = teams_for(product.shape, facts);
  const std::vector<Storage> storages = storages_for(weights_, product.weight->bytes(), facts);
  const auto add = [&](Storage storage, std::int64_t of) {
    ways.push_back(product.shape);
    ways.back().storage = storage;
    ways.back().teams = of;
  };
  for (const std::int64_t of : teams) add(storages.front(), of);
  for (std::size_t other = 1; other < storages.size(); ++other) add(storages[other], teams.front());
  return ways;
}

// Chooses the fastest measured way, or the rule's if nothing is measured.
void ForwardPass::tune(CompiledProduct& product) {
  const std::vector<ProductShape> ways = ways_of(product);
  std::vector<std::shared_ptr<const CompiledKernel>> kernels(ways.size());
  const auto kernel_of = [&](std::size_t way) {
    if (kernels[way] == nullptr) kernels[way] = compile(fused_dqp(ways[way]));
    return kernels[way];
  };
  const bool has_image = std::ranges::any_of(
      ways, [](const ProductShape& way) { return way.storage == Storage::kImage; });
  if (has_image && (tuner_.measures() || ways.front().storage == Storage::kImage))
    product.image = context_->image_of(*product.weight);
  // Zeros in the place of each vector.
  Buffer read;
  Buffer written;
  const KernelDescription described = fused_dqp(ways.front());
  if (tuner_.measures()) {
    const std::int64_t longest = std::max(product.shape.columns, product.shape.rows);
    const std::vector<float> zeros(static_cast<std::size_t>(longest));
    read = context_->allocate(zeros.size() * sizeof(float));
    written = context_->allocate(zeros.size() * sizeof(float));
    context_->write(read, std::as_bytes(std::span(zeros)));
  }
  const auto launch_way = [&](std::size_t one) {
    std::vector<const Buffer*> buffers;
    for (const TensorDescription& tensor : described.arguments())
      buffers.push_back(tensor.access == Access::kWrite ? &written : &read);
    buffers[1] = product.held_in(ways[one].storage);
    launch(*kernel_of(one), fused_dqp_grid(ways[one], 1), buffers, {});
  };
  const std::size_t way = tuner_.fastest(generate(described, context_->dialect(), stored_.element),
                                         ways.size(), launch_way);
  product.shape = ways[way];
  product.fused = kernel_of(way);
  if (product.shape.storage == Storage::kBuffer) product.image = {};
}

AttentionShape ForwardPass::attention_shape() const {
  const AttentionShape shape{.heads = decoder_.attention().heads,
                             .kv_heads = decoder_.attention().kv_heads,
                             .head_size = decoder_.attention().head_size,
                             .cache = cache_,
                             .softcap = decoder_.attention().softcap,
                             .one_sequence = true,
                             .appends = true,
                             .qk_norm = heads_shape_.qk_norm,
                             .epsilon = heads_shape_.epsilon,
                             .rotated = heads_shape_.rotated,
                             .scale = heads_shape_.scale,
                             .is_paged = heads_shape_.is_paged,
                             .has_sinks = decoder_.attention().sinks,
                             .lanes = attention_lanes(context_->facts())};
  if (flow_attention_memory(shape) > context_->facts().local_memory)
    fail("expected heads that take at most ", context_->facts().local_memory,
         " bytes of a work-group's memory on ", context_->facts().title(), ", got ",
         flow_attention_memory(shape), ": use device = cpu");
  return shape;
}

void ForwardPass::compile_attention() {
  attention_shape_ = attention_shape();
  attention_ = compile(flow_attention(attention_shape_));
  tiles_shape_ = attention_shape_;
  tiles_shape_.appends = false;
  tiles_shape_.scale = 1;  // append_heads has scaled queries
  tiles_shape_.in_tiles = true;
  attention_of_prompt_ = fastest_prompt();
  AttentionShape in_parts = attention_shape_;
  in_parts.has_parts = true;
  attention_in_parts_ = compile(flow_attention(in_parts));
  merge_ = compile(merge_attention(in_parts));
  if (!decoder_.attention().bidirectional_blocks) return;
  AttentionShape of_blocks = tiles_shape_;
  of_blocks.has_blocks = true;
  const bool in_matrices = attention_of_prompt_.in_matrices;
  attention_of_blocks_ = {.kernel = compile(describe_prompt(of_blocks, in_matrices)),
                          .in_matrices = in_matrices};
}

KernelDescription ForwardPass::describe_prompt(const AttentionShape& shape,
                                               bool in_matrices) const {
  return in_matrices ? flow_attention_of_matrices(shape, context_->facts().matrix_units())
                     : flow_attention(shape);
}

ForwardPass::PromptKernel ForwardPass::fastest_prompt() {
  const std::vector<bool> ways = ways_with_matrices(matrices_, tiles_shape_, *context_);
  const std::int64_t capacity = kPastOfMeasured + most_tokens();
  Buffer cached;  // in the place of keys, values and sinks; float32 is the largest type of a cache
  if (tuner_.measures() && ways.size() > 1)
    cached = context_->allocate(
        static_cast<std::size_t>(tiles_shape_.kv_heads * capacity * tiles_shape_.head_size) *
        sizeof(float));
  std::vector<const Buffer*> buffers{of(kQuery), &cached, &cached, of(kAttended)};
  if (tiles_shape_.has_sinks) buffers.push_back(&cached);
  return fastest(
      ways, [&](bool in_matrices) { return describe_prompt(tiles_shape_, in_matrices); },
      [&](const PromptKernel& way) {
        launch_prompt(
            way, most_tokens(), buffers,
            std::array{std::int64_t{0}, kPastOfMeasured, most_tokens(), capacity, std::int64_t{0}});
      });
}

}  // namespace flownpu::gpu
