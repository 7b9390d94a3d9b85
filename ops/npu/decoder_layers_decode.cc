// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/decoder_layers_decode.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "ops/number_formats.h"

namespace flownpu::npu {
namespace {

// In the order of a call's arguments.
enum Argument : std::uint8_t { kWeights, kVectors, kRotary, kCache, kState, kLogits };

std::string layers_text(std::int64_t first, std::int64_t count) {
  const std::string text = std::to_string(first);
  return count == 1 ? "layer " + text : "layers " + text + "-" + std::to_string(first + count - 1);
}

}  // namespace

CallAttributes layer_attributes(const DecoderShape& shape) {
  return {{"hidden", {shape.hidden}},
          {"heads", {shape.heads}},
          {"kv_heads", {shape.kv_heads}},
          {"head_size", {shape.head_size}},
          {"feed_forward", {shape.padded_feed_forward()}},
          {"geglu", {shape.activation == "geglu" ? 1 : 0}},
          {"post_norms", {shape.post_norms ? 1 : 0}},
          {"qk_norm", {shape.qk_norm ? 1 : 0}},
          {"epsilon", {bits_of(shape.epsilon)}},
          {"scale", {bits_of(shape.scale)}},
          {"n_tables", {shape.tables()}}};
}

DecodeCalls::DecodeCalls(std::shared_ptr<CompiledDesigns> designs, const DecoderShape& shape)
    : designs_(std::move(designs)), shape_(shape), context_(find_context()) {
  find_parts();
}

// The largest there is.
std::int64_t DecodeCalls::find_context() const {
  CallAttributes attributes = layer_attributes(shape_);
  attributes["first"] = {0};
  std::int64_t context = 0;
  for (const CallRecord* call : designs_->artifacts().find("decode_layer", attributes)) {
    const auto found = call->attributes.find("context");
    if (found != call->attributes.end() && found->second.size() == 1)
      context = std::max(context, found->second.front());
  }
  const Artifacts& artifacts = designs_->artifacts();
  // None: says which there are.
  if (context == 0) artifacts.require("decode_layer", attributes);
  // ONNX Runtime counts positions in 32 bits; sizes of caches are this times some kilobytes.
  if (context > std::numeric_limits<std::int32_t>::max()) {
    artifacts.refuse(artifacts.folder() + " has designs for a context of " +
                         std::to_string(context) + " positions, which no model has",
                     "build them again");
  }
  return context;
}

void DecodeCalls::find_parts() {
  const Artifacts& artifacts = designs_->artifacts();
  CallAttributes attributes = layer_attributes(shape_);
  attributes["context"] = {context_};
  for (std::int64_t first = 0; first < shape_.layer_count();) {
    attributes["first"] = {first};
    // How many layers the call has, it says itself.
    std::int64_t count = shape_.layer_count() - first;
    for (const CallRecord* call : artifacts.find("decode_layer", attributes)) {
      const auto layers = call->attributes.find("layers");
      if (layers != call->attributes.end() && layers->second.size() == 1)
        count = std::clamp<std::int64_t>(layers->second.front(), 1, count);
    }
    CallAttributes wanted = attributes;
    wanted["layers"] = {count};
    wanted["windows"] = shape_.windows(first, count);
    wanted["tables"] = shape_.rotary_tables(first, count);
    wanted["vocabulary"] = {first + count == shape_.layer_count() ? shape_.vocabulary : 0};
    const CallRecord& call = artifacts.require("decode_layer", wanted);
    parts_.push_back({PreparedCall(*designs_, call), first, count, {}});
    const bool same =
        parts_.size() > 1 && parts_[parts_.size() - 2].call.array() == parts_.back().call.array();
    dispatches_ += same ? 0 : 1;
    first += count;
  }
}

void DecodeCalls::bind(const DecoderBuffers& buffers) {
  const std::span<const BufferRecord> last = parts_.back().call.buffers();
  state_ = designs_->runtime().allocate(last.size() > kState ? last[kState].bytes : 0);
  logits_ =
      designs_->runtime().allocate(static_cast<std::size_t>(shape_.vocabulary) * kBFloat16Bytes);
  state_->to_device(0, state_->bytes().size());
  for (Part& part : parts_) {
    const auto first = static_cast<std::size_t>(part.first);
    const auto count = static_cast<std::size_t>(part.layers);
    const bool ends = part.first + part.layers == shape_.layer_count();
    const std::size_t layer_cache = static_cast<std::size_t>(context_) * shape_.position_bytes();
    part.arguments = {
        {.buffer = buffers.weights.get(),
         .offset = first * shape_.layer_weight_bytes(),
         .bytes = count * shape_.layer_weight_bytes() + (ends ? shape_.head().bytes() : 0)},
        {.buffer = buffers.vectors.get(),
         .offset = first * shape_.layer_vector_bytes(),
         .bytes = count * shape_.layer_vector_bytes() + (ends ? shape_.final_vector_bytes() : 0)},
        {.buffer = buffers.rotary.get(), .offset = 0, .bytes = buffers.rotary->bytes().size()},
        {.buffer = nullptr, .offset = first * layer_cache, .bytes = count * layer_cache},
        {.buffer = state_.get(), .offset = 0, .bytes = state_->bytes().size()}};
    if (ends)
      part.arguments.push_back(
          {.buffer = logits_.get(), .offset = 0, .bytes = logits_->bytes().size()});
    part.call.require(part.arguments);
  }
}

void DecodeCalls::run(std::span<const float> hidden, std::int64_t position, Buffer& cache,
                      std::span<float> logits) {
  // The residual stream, and nothing to be added to it: two lines, zeros beyond D.
  const auto line = static_cast<std::size_t>(shape_.line());
  auto* stream = reinterpret_cast<std::uint16_t*>(state_->bytes().data());
  std::memset(stream, 0, 2 * line * kBFloat16Bytes);
  for (std::size_t i = 0; i < hidden.size(); ++i) stream[i] = to_bfloat16(hidden[i]);
  state_->to_device(0, 2 * line * kBFloat16Bytes);

  std::vector<Call> calls;
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    Part& part = parts_[i];
    part.arguments[kCache].buffer = &cache;
    calls.push_back({.name = "decode_layer, " + layers_text(part.first, part.layers) +
                             ", position " + std::to_string(position),
                     .sequence = part.call.at(position),
                     .arguments = part.arguments,
                     .family = part.call.file(),
                     .position = position});
    if (i + 1 < parts_.size() && parts_[i + 1].call.array() == part.call.array()) continue;
    designs_->dispatch(part.call.array(), calls);
    calls.clear();
  }
  if (logits.empty()) return;
  logits_->to_host(0, logits_->bytes().size());
  const auto* from = reinterpret_cast<const std::uint16_t*>(logits_->bytes().data());
  std::ranges::transform(from, from + logits.size(), logits.begin(), from_bfloat16);
}

}  // namespace flownpu::npu
