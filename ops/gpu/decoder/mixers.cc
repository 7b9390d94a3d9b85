// SPDX-License-Identifier: Apache-2.0
// ForwardPass's mixers beside attention, and the gate of attention's output.
#include <cmath>

#include "ops/gpu/decoder/forward_pass.h"
#include "ops/gpu/kernels/states/kernels.h"

namespace flownpu::gpu {
namespace {

using transformer::GatedDelta;

// States of a gated delta rule; a short convolution has the first alone.
enum State : std::uint8_t { kOfConvolution, kOfRule };

ShortConvolutionShape convolution_shape(const transformer::Decoder& decoder,
                                        const transformer::Layer& layer) {
  if (const auto* delta = std::get_if<GatedDelta>(&layer.mixer))
    return {.channels = delta->channels(), .taps = delta->taps, .columns = delta->channels()};
  return {.channels = decoder.hidden,
          .taps = std::get<transformer::ShortConvolution>(layer.mixer).taps,
          .columns = 3 * decoder.hidden,
          .is_gated = true};
}

}  // namespace

DeltaShape ForwardPass::delta_shape(const transformer::GatedDelta& delta) {
  return {.key_heads = delta.key_heads,
          .value_heads = delta.value_heads,
          .key_size = delta.key_size,
          .value_size = delta.value_size,
          .scale = 1 / std::sqrt(static_cast<float>(delta.key_size)),
          .is_packed = true};
}

std::int64_t ForwardPass::kernels_of(const transformer::Decoder& decoder,
                                     const transformer::Layer& layer) {
  // A norm, the router, the choice and the sum of answers.
  const std::int64_t of_experts = decoder.feed_forward().experts > 0 ? 4 : 0;
  const std::int64_t products = 4 + of_experts;
  if (std::holds_alternative<GatedDelta>(layer.mixer))
    return products + 6;  // a norm, gates' product, rates, convolution, rule, norm and gate
  if (!layer.has_attention()) return products + 2;                // a norm, the convolution
  return products + 1 + (gate_rows(decoder, layer) > 0 ? 3 : 0);  // a norm, gates' product, gate
}

ForwardPass::LayerMixer ForwardPass::compile_mixer(const transformer::Layer& layer) {
  LayerMixer mixer;
  if (layer.has_attention()) {
    if (layer.attention().output_gate) mixer.gate = compile(sigmoid_gate());
    return mixer;
  }
  mixer.convolution = compile(short_convolution(convolution_shape(decoder_, layer)));
  if (const auto* delta = std::get_if<GatedDelta>(&layer.mixer)) {
    mixer.rates = compile(delta_rates(delta->value_heads, decoder_.hidden));
    const DeltaShape shape = delta_shape(*delta);
    mixer.delta = compile(gated_delta(shape));
    if (takes_chunks(shape, most_tokens(), context_->facts().local_memory)) {
      mixer.pairs = compile(delta_pairs(shape));
      mixer.chunks = compile(gated_delta_chunks(shape));
    }
    mixer.gate = compile(gated_rms_norm(delta->values(), delta->value_size, decoder_.epsilon));
  }
  return mixer;
}

ForwardPass::Activation ForwardPass::mix(std::size_t layer, std::int64_t tokens,
                                         std::span<const Segment> segments) {
  const transformer::Layer& own = decoder_.layers[layer];
  const LayerMixer& mixer = layers_[layer].mixer;
  if (own.has_attention()) {
    attend(layer, segments);
    if (mixer.gate == nullptr) return kAttended;
    const std::int64_t count = tokens * decoder_.attended();
    launch(*mixer.gate, sigmoid_gate_grid(count), {of(kAttended), of(kGates), of(kMixed)}, {count});
    return kMixed;
  }
  const auto* delta = std::get_if<GatedDelta>(&own.mixer);
  for (const Segment& segment : segments) {
    convolve(layer, segment, delta != nullptr ? kConvolved : kAttended);
    if (delta != nullptr) apply_delta(layer, *delta, segment);
    segment.states->advance(layer);
  }
  if (delta != nullptr)
    launch(*mixer.gate, gated_rms_norm_grid(delta->values(), delta->value_size, tokens),
           {of(kMixed), &constants_.layers[layer].state[kNormWeight], of(kGates), of(kAttended)});
  return kAttended;
}

void ForwardPass::convolve(std::size_t layer, const Segment& segment, Activation into) {
  const ShortConvolutionShape shape = convolution_shape(decoder_, decoder_.layers[layer]);
  launch(*layers_[layer].mixer.convolution, short_convolution_grid(shape, segment.count),
         {of(kPacked), &constants_.layers[layer].state[kTaps],
          segment.states->before(layer, kOfConvolution), of(into),
          segment.states->behind(layer, kOfConvolution)},
         {segment.first, segment.count});
}

void ForwardPass::apply_delta(std::size_t layer, const GatedDelta& delta, const Segment& segment) {
  const std::vector<Buffer>& constants = constants_.layers[layer].state;
  const LayerMixer& mixer = layers_[layer].mixer;
  launch(*mixer.rates, delta_rates_grid(delta.value_heads, segment.count),
         {of(kNormalised), &constants[kDecayWeight], &constants[kShareWeight],
          &constants[kTimeBias], &constants[kDecayScale], of(kDecays), of(kShares)},
         {segment.first});
  const DeltaShape shape = delta_shape(delta);
  const Buffer* given = of(kConvolved);
  const Buffer* before = segment.states->before(layer, kOfRule);
  const Buffer* behind = segment.states->behind(layer, kOfRule);
  if (takes_chunks(shape, segment.count, context_->facts().local_memory)) {
    launch(*mixer.pairs, delta_pairs_grid(shape, segment.count),
           {given, given, of(kDecays), of(kShares), of(kPairs)}, {segment.first, segment.count});
    launch(*mixer.chunks, gated_delta_chunks_grid(shape),
           {given, given, given, of(kPairs), before, of(kMixed), behind},
           {segment.first, segment.count});
    return;
  }
  launch(*mixer.delta, gated_delta_grid(shape),
         {given, given, given, of(kDecays), of(kShares), before, of(kMixed), behind},
         {segment.first, segment.count});
}

}  // namespace flownpu::gpu
