// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/decoder/forward_pass.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "ops/error.h"
#include "ops/gpu/kernels/matrices/flow_attention.h"
#include "ops/gpu/kernels/matrices/q4nx_matmul.h"
#include "ops/gpu/operators/run.h"

namespace flownpu::gpu {
std::int64_t ForwardPass::most_tokens(const transformer::Decoder& decoder) {
  return std::min(kMostTokens, decoder.positions);
}

// Steps of a layer: 0 QKV, 1 append, 2 attention, 3 output, 4 the middle entry's norms, 5 gate and
// up, 6 down, 7 the next layer's first norms; after the last layer, 8, the LM head. A value lives
// until the end of the last step that reads it.
std::array<Lifetime, ForwardPass::kActivations> ForwardPass::lifetimes(
    const transformer::Decoder& decoder, const StoredType& stored, std::int64_t tokens) {
  const std::int64_t attention = decoder.attended();
  std::int64_t mixed = 0;
  std::int64_t packed = 0;
  std::int64_t gates = 0;
  std::int64_t convolved = 0;
  std::int64_t rates = 0;
  std::int64_t pairs = 0;
  for (const transformer::Layer& layer : decoder.layers) {
    mixed = std::max(mixed, decoder.output_columns(layer));
    gates = std::max(gates, gate_rows(decoder, layer));
    packed = std::max(packed, decoder.input_rows(layer) - gate_rows(decoder, layer));
    if (const auto* delta = std::get_if<transformer::GatedDelta>(&layer.mixer)) {
      convolved = std::max(convolved, delta->channels());
      rates = std::max(rates, delta->value_heads);
      pairs = std::max(pairs, delta_pairs_floats(delta_shape(*delta), tokens));
    }
  }
  const std::int64_t widest = std::max({decoder.hidden, mixed, decoder.feed_forward().size});
  const std::int64_t groups = q4nx::groups_of(widest);
  const auto floats = [&](std::int64_t columns) {
    return static_cast<std::size_t>(tokens * columns) * sizeof(float);
  };
  const auto activations = [&](std::int64_t columns) {
    return static_cast<std::size_t>(tokens * columns * stored.bytes());
  };
  const std::vector<std::pair<int, int>> always{{0, 8}};
  const std::vector<std::pair<int, int>> products{{0, 0}, {3, 3}, {5, 5}, {6, 6}, {8, 8}};
  std::array<Lifetime, kActivations> values;
  values[kResidual] = {floats(decoder.hidden), always};
  values[kOtherResidual] = {floats(decoder.hidden), always};
  values[kNormalised] = {activations(decoder.hidden), {{0, rates > 0 ? 2 : 0}, {4, 5}, {7, 8}}};
  values[kPacked] = {activations(packed), {{0, decoder.has_states() ? 2 : 1}}};
  values[kQuery] = {activations(attention), {{1, 2}}};
  values[kAttended] = {activations(mixed), {{2, 3}}};
  if (gates > 0) {
    values[kGates] = {activations(gates), {{0, 2}}};
    values[kMixed] = {activations(mixed), {{2, 3}}};
  }
  if (convolved > 0) {
    values[kConvolved] = {activations(convolved), {{1, 2}}};
    values[kDecays] = {floats(rates), {{1, 2}}};
    values[kShares] = {floats(rates), {{1, 2}}};
    values[kPairs] = {static_cast<std::size_t>(pairs) * sizeof(float), {{2, 2}}};
  }
  values[kUpdate] = {floats(decoder.hidden), {{0, 0}, {3, 7}}};
  values[kGated] = {floats(decoder.feed_forward().size), {{5, 6}}};
  values[kCodes] = {static_cast<std::size_t>(tokens * groups * q4nx::kGroup), products};
  values[kScales] = {floats(groups), products};
  values[kSums] = {floats(groups), products};
  values[kLast] = {activations(decoder.hidden), always};  // kept from chunk to chunk of a prompt
  if (decoder.attention().bidirectional_blocks)
    values[kEnds] = {static_cast<std::size_t>(tokens) * sizeof(std::int32_t), always};
  values[kPartSums] = {static_cast<std::size_t>(kMostParts * attention) * sizeof(float), {{2, 2}}};
  values[kPartStates] = {
      static_cast<std::size_t>(kMostParts * decoder.attention().heads * 2) * sizeof(float),
      {{2, 2}}};
  return values;
}

std::int64_t ForwardPass::activation_bytes(const transformer::Decoder& decoder,
                                           const StoredType& stored) {
  const SharedBuffers shared = share_buffers(lifetimes(decoder, stored, most_tokens(decoder)));
  const auto bytes = static_cast<std::int64_t>(
      std::accumulate(shared.bytes.begin(), shared.bytes.end(), std::size_t{0}));
  return decoder.feed_forward().experts == 0
             ? bytes
             : bytes + mixture_shape(decoder).bytes(most_tokens(decoder));
}

ForwardPass::ForwardPass(std::shared_ptr<Context> context, const transformer::Decoder& decoder,
                         const PlacedConstants& constants, const PassOptions& options)
    : context_(std::move(context)),
      decoder_(decoder),
      constants_(constants),
      cache_(element_of_cache(options.cache)),
      stored_(choose_stored_type(*context_, options.dtype)),
      weights_(options.weights),
      matrices_(options.matrices),
      rounds_(options.activations == Activations::kInt8),
      tuner_(*context_),
      room_(most_tokens(decoder)),
      shared_(share_buffers(lifetimes(decoder, stored_, room_))),
      heads_shape_{.heads = decoder.attention().heads,
                   .kv_heads = decoder.attention().kv_heads,
                   .head_size = decoder.attention().head_size,
                   .cache = cache_,
                   .scale = decoder.attention().scale,
                   .qk_norm = decoder.attention().has_qk_norm(),
                   .epsilon = decoder.epsilon,
                   .rotated = decoder.rotated_size,
                   .is_paged = options.paged} {
  buffers_ = allocated(shared_);
  const NormShape norm{.columns = decoder.hidden, .epsilon = decoder.epsilon};
  first_norm_ = compile(rms_norm(norm));
  entry_norm_ = compile(rms_norm({.columns = decoder.hidden,
                                  .epsilon = decoder.epsilon,
                                  .has_skip = true,
                                  .norms_skip = decoder.post_norms(),
                                  .writes_sum = true}));
  append_ = compile(append_heads(heads_shape_));
  compile_attention();
  for (std::size_t i = 0; i < decoder.layers.size(); ++i) layers_.push_back(compile_layer(i));
  if (decoder.feed_forward().experts > 0)
    experts_.reserve(*context_, mixture_shape(decoder), most_tokens());
  const ProductShape head{
      .rows = decoder.vocabulary, .columns = decoder.hidden, .result = Element::kFloat32};
  head_ = compile_product(head, head, constants.head);
}

std::vector<Buffer> ForwardPass::allocated(const SharedBuffers& shared) {
  std::vector<Buffer> buffers;
  for (const std::size_t bytes : shared.bytes) {
    check_bytes(bytes, "activations");
    buffers.push_back(context_->allocate(bytes));
  }
  return buffers;
}

void ForwardPass::make_room(std::int64_t tokens) {
  if (tokens <= room_) return;
  if (!std::ranges::all_of(constants_.rotary, &PlacedConstants::Rotary::by_position))
    unsupported("expected at most ", room_, " tokens that see one another where the graph makes ",
                "rotary tables, or layers have none, got ", tokens,
                ": set the provider option on_unsupported to cpu");
  SharedBuffers shared = share_buffers(lifetimes(decoder_, stored_, tokens));
  try {
    std::vector<Buffer> buffers = allocated(shared);
    context_->wait();  // Before what kernels use is freed.
    if (decoder_.feed_forward().experts > 0)
      experts_.reserve(*context_, mixture_shape(decoder_), tokens);
    buffers_ = std::move(buffers);
  } catch (const GpuError& error) {
    if (error.failure() != Failure::kMemory) throw;
    unsupported(error.what(), ": it is for the activations of ", tokens,
                " tokens that see one another, which are computed at once: give smaller images, or "
                "set the provider option on_unsupported to cpu");
  }
  shared_ = std::move(shared);
  room_ = tokens;
}

void ForwardPass::launch(const CompiledKernel& kernel, const Grid& grid,
                         std::initializer_list<const Buffer*> buffers,
                         std::initializer_list<std::int64_t> parameters) {
  launch(kernel, grid, std::span(buffers.begin(), buffers.size()),
         std::span(parameters.begin(), parameters.size()));
}

void ForwardPass::launch(const CompiledKernel& kernel, const Grid& grid,
                         std::span<const Buffer* const> buffers,
                         std::span<const std::int64_t> parameters) {
  arguments_.assign(buffers.begin(), buffers.end());
  for (const std::int64_t parameter : parameters)
    arguments_.emplace_back(static_cast<std::int32_t>(parameter));
  context_->launch(kernel, arguments_, grid);
}

void ForwardPass::multiply(const CompiledProduct& product, std::int64_t tokens, const Buffer* x,
                           const Buffer* y) {
  if (tokens == 1 || !rounds_) {
    std::vector<const Buffer*> buffers{x, product.held(), y};
    if (product.bias != nullptr) buffers.push_back(product.bias);
    launch(tokens == 1 ? *product.fused : *product.many, fused_dqp_grid(product.shape, tokens),
           buffers, {});
    return;
  }
  launch(*product.quantize, quantize_rows_grid(product.shape.columns, tokens),
         {x, of(kCodes), of(kScales), of(kSums)});
  std::vector<const Buffer*> buffers{of(kCodes), of(kScales), of(kSums), product.held(), y};
  if (product.bias != nullptr) buffers.push_back(product.bias);
  launch(*product.rounded.kernel,
         product.rounded.in_matrices ? q4nx_matmul_of_matrices_grid(product.shape, tokens)
                                     : q4nx_matmul_grid(product.shape, tokens),
         buffers, std::array{tokens});
}

ForwardPass::Attended ForwardPass::attended_by(std::size_t layer, const Segment& segment) const {
  const transformer::Attention& kind = decoder_.layers[layer].attention();
  const std::size_t part = 2 * layers_[layer].attention;
  return {.kind = kind,
          .constants = constants_.layers[layer],
          .rotary = constants_.rotary[static_cast<std::size_t>(kind.table)],
          .keys = &segment.cache->part(part),
          .values = &segment.cache->part(part + 1),
          .capacity = segment.cache->capacity()};
}

// The last arguments of the kernels that read or write a paged cache.
void ForwardPass::add_pages(const Segment& segment, std::vector<const Buffer*>& buffers,
                            std::vector<std::int64_t>& parameters) {
  if (segment.pages == nullptr) return;
  buffers.push_back(&segment.pages->table);
  parameters.insert(parameters.end(),
                    {segment.sequence, segment.pages->columns, segment.pages->rows});
}

void ForwardPass::attend(std::size_t layer, std::span<const Segment> segments) {
  for (const Segment& segment : segments) {
    if (segment.count == 1) {
      attend_token(layer, segment);
    } else {
      attend_prompt(layer, segment);
    }
  }
}

void ForwardPass::attend_prompt(std::size_t layer, const Segment& segment) {
  const auto [kind, constants, rotary, keys, values, capacity] = attended_by(layer, segment);
  std::vector<const Buffer*> appended{of(kPacked), &rotary.cosines, &rotary.sines, of(kQuery),
                                      keys,        values};
  if (heads_shape_.qk_norm) appended.insert(appended.end(), {&constants.q_norm, &constants.k_norm});
  std::vector<std::int64_t> parameters{segment.first, segment.past, turn_of(rotary, segment),
                                       capacity};
  add_pages(segment, appended, parameters);
  launch(*append_, append_heads_grid(heads_shape_, segment.count), appended, parameters);
  std::vector<const Buffer*> buffers{of(kQuery), keys, values};
  if (segment.has_blocks) buffers.push_back(of(kEnds));
  buffers.push_back(of(kAttended));
  if (kind.sinks) buffers.push_back(&constants.sinks);
  parameters = {segment.first, segment.past, segment.count, capacity, kind.window};
  add_pages(segment, buffers, parameters);
  launch_prompt(segment.has_blocks ? attention_of_blocks_ : attention_of_prompt_, segment.count,
                buffers, parameters);
}

void ForwardPass::launch_prompt(const PromptKernel& kernel, std::int64_t tokens,
                                std::span<const Buffer* const> buffers,
                                std::span<const std::int64_t> parameters) {
  launch(*kernel.kernel,
         kernel.in_matrices ? flow_attention_of_matrices_grid(
                                  tiles_shape_, context_->facts().matrix_units(), 1, tokens)
                            : flow_attention_grid(tiles_shape_, 1, tokens),
         buffers, parameters);
}

void ForwardPass::attend_token(std::size_t layer, const Segment& segment) {
  const auto [kind, constants, rotary, keys, values, capacity] = attended_by(layer, segment);
  const std::int64_t parts = parts_of(kind, segment);
  std::vector<const Buffer*> buffers{of(kPacked), keys, values};
  std::vector<std::int64_t> parameters{segment.first, segment.past, 1, capacity, kind.window};
  if (parts > 1) {
    buffers.insert(buffers.end(), {of(kPartSums), of(kPartStates)});
    parameters.push_back(parts);
  } else {
    buffers.push_back(of(kAttended));
  }
  buffers.insert(buffers.end(), {&rotary.cosines, &rotary.sines, keys, values});
  parameters.push_back(turn_of(rotary, segment));
  if (heads_shape_.qk_norm) buffers.insert(buffers.end(), {&constants.q_norm, &constants.k_norm});
  if (kind.sinks && parts == 1) buffers.push_back(&constants.sinks);
  add_pages(segment, buffers, parameters);
  launch(parts > 1 ? *attention_in_parts_ : *attention_,
         flow_attention_grid(attention_shape_, parts, 1), buffers, parameters);
  if (parts == 1) return;
  buffers = {of(kPartSums), of(kPartStates), of(kAttended)};
  if (kind.sinks) buffers.push_back(&constants.sinks);
  launch(*merge_, merge_attention_grid(attention_shape_), buffers,
         std::array{segment.first, parts});
}

std::int64_t ForwardPass::parts_of(const transformer::Attention& kind,
                                   const Segment& segment) const {
  const std::int64_t all = segment.past + 1;
  const std::int64_t keys = kind.window > 0 ? std::min(all, kind.window) : all;
  const std::int64_t wanted = q4nx::ceil_div(kGroupsOfUnit * context_->facts().compute_units,
                                             decoder_.attention().kv_heads);
  return std::max<std::int64_t>(std::min({keys / kKeysOfPart, wanted, kMostParts}), 1);
}

// Adds the update to the residual stream, and normalises the sum.
void ForwardPass::enter(const EntryNorms& norms, std::int64_t tokens) {
  const Activation next = other_residual();
  if (decoder_.post_norms()) {
    launch(*entry_norm_, rms_norm_grid(decoder_.hidden, tokens),
           {of(residual_), &norms.sum, of(kNormalised), of(kUpdate), &norms.added, of(next)},
           {tokens});
  } else {
    launch(*entry_norm_, rms_norm_grid(decoder_.hidden, tokens),
           {of(residual_), &norms.sum, of(kNormalised), of(kUpdate), of(next)}, {tokens});
  }
  residual_ = next;
}

void ForwardPass::write_hidden(std::int64_t first, std::span<const float> rows) {
  residual_ = kResidual;
  context_->write(*of(kResidual), std::as_bytes(rows),
                  static_cast<std::size_t>(first * decoder_.hidden) * sizeof(float));
}

void ForwardPass::write_ends(std::int64_t first, std::span<const std::int32_t> ends) {
  context_->write(*of(kEnds), std::as_bytes(ends),
                  static_cast<std::size_t>(first) * sizeof(std::int32_t));
}

void ForwardPass::write_table(std::size_t table, std::int64_t first, std::span<const float> cosines,
                              std::span<const float> sines) {
  const PlacedConstants::Rotary& rotary = constants_.rotary[table];
  const std::int64_t columns = heads_shape_.half();
  const std::size_t from = static_cast<std::size_t>(first * columns) * sizeof(float);
  context_->write(rotary.cosines, std::as_bytes(cosines), from);
  context_->write(rotary.sines, std::as_bytes(sines), from);
}

void ForwardPass::multiply_residual(const CompiledProduct& product, const EntryNorms& norms,
                                    const Buffer* y) {
  std::vector<const Buffer*> buffers{of(residual_), product.held(), y, &norms.sum};
  if (product.shape.norm && product.shape.norm->has_skip) {
    residual_ = other_residual();
    buffers.insert(buffers.end(), {of(kUpdate), &norms.added, of(residual_)});
  }
  if (product.bias != nullptr) buffers.push_back(product.bias);
  launch(*product.fused, fused_dqp_grid(product.shape, 1), buffers, {});
}

void ForwardPass::multiply_into_residual(const CompiledProduct& product, const Buffer* x) {
  const Grid grid = fused_dqp_grid(product.shape, 1);
  std::vector<const Buffer*> buffers{x, product.held(), of(kUpdate)};
  if (product.bias != nullptr) buffers.push_back(product.bias);
  if (product.shape.has_residual) {
    buffers.push_back(of(residual_));
    residual_ = other_residual();
    buffers[2] = of(residual_);
  }
  launch(*product.fused, grid, buffers, {});
}

// The entry of a layer with several readers of the normalised stream, each of which would normalise
// it for itself.
void ForwardPass::normalise_token(std::size_t layer) {
  const EntryNorms& norms = constants_.layers[layer].first;
  if (decoder_.post_norms() && layer > 0) return enter(norms, 1);
  normalise(norms.sum, 1);
}

void ForwardPass::normalise(const Buffer& weight, std::int64_t tokens) {
  launch(*first_norm_, rms_norm_grid(decoder_.hidden, tokens),
         {of(residual_), &weight, of(kNormalised)});
}

// Experts' router reads the normalised stream, too, so that it is normalised once.
void ForwardPass::feed_forward_token(const LayerProducts& layer, const EntryNorms& norms) {
  if (!layer.experts) {
    multiply_residual(layer.gate_up, norms, of(kGated));
    return multiply_into_residual(layer.down, of(kGated));
  }
  normalise(norms.sum, 1);
  layer.experts->enqueue(*context_, experts_, 1, of(kNormalised), of(other_residual()),
                         of(residual_));
  residual_ = other_residual();
}

void ForwardPass::multiply_first(const LayerProducts& layer, std::int64_t tokens) {
  multiply(layer.qkv, tokens, of(kNormalised), of(kPacked));
  if (layer.gates.weight != nullptr) multiply(layer.gates, tokens, of(kNormalised), of(kGates));
}

void ForwardPass::run_token(const Segment& segment) {
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const LayerProducts& layer = layers_[i];
    if (layer.qkv.shape.norm) {
      multiply_residual(layer.qkv, constants_.layers[i].first, of(kPacked));
    } else {
      normalise_token(i);
      multiply_first(layer, 1);
    }
    multiply_into_residual(layer.output, of(mix(i, 1, {&segment, 1})));
    feed_forward_token(layer, constants_.layers[i].middle);
  }
  if (decoder_.post_norms()) return enter(constants_.last, 1);
  normalise(constants_.last.sum, 1);
}

void ForwardPass::run_layers(std::int64_t tokens, std::span<const Segment> segments) {
  if (tokens == 1) return run_token(segments.front());
  normalise(constants_.layers.front().first.sum, tokens);
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const LayerProducts& layer = layers_[i];
    multiply_first(layer, tokens);
    multiply(layer.output, tokens, of(mix(i, tokens, segments)), of(kUpdate));
    enter(constants_.layers[i].middle, tokens);
    if (layer.experts) {
      layer.experts->enqueue(*context_, experts_, tokens, of(kNormalised), of(kUpdate));
    } else {
      multiply(layer.gate_up, tokens, of(kNormalised), of(kGated));
      multiply(layer.down, tokens, of(kGated), of(kUpdate));
    }
    enter(i + 1 < layers_.size() ? constants_.layers[i + 1].first : constants_.last, tokens);
  }
}

void ForwardPass::keep_last(std::int64_t sequence, std::int64_t token) {
  const std::size_t bytes = static_cast<std::size_t>(decoder_.hidden * stored_.bytes());
  context_->copy(*of(kNormalised), static_cast<std::size_t>(token) * bytes, *of(kLast),
                 static_cast<std::size_t>(sequence) * bytes, bytes);
}

void ForwardPass::run_head(std::int64_t sequences, bool kept) {
  if (sequences > logits_rows_) {
    const std::size_t bytes =
        static_cast<std::size_t>(sequences * decoder_.vocabulary) * sizeof(float);
    check_bytes(bytes, "logits");
    logits_ = context_->allocate(bytes);
    logits_rows_ = sequences;
  }
  multiply(head_, sequences, kept ? of(kLast) : of(kNormalised), &logits_);
}

void ForwardPass::read_logits(std::span<float> logits, std::int64_t first) {
  context_->read(logits_, std::as_writable_bytes(logits),
                 static_cast<std::size_t>(first * decoder_.vocabulary) * sizeof(float));
}

std::int64_t ForwardPass::dispatches_of(const transformer::Decoder& decoder) {
  std::int64_t count = 2;  // at last a norm and the LM head
  for (const transformer::Layer& layer : decoder.layers) count += kernels_of(decoder, layer);
  return count;
}

}  // namespace flownpu::gpu
