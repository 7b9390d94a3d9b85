// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/decoder/step.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "ops/error.h"
#include "ops/gpu/context/observed_run.h"
#include "ops/gpu/decoder/cache_memory.h"
#include "ops/gpu/opencl/status.h"
#include "ops/nodes/flow_qkv_attention.h"
#include "ops/transformer/paged.h"

namespace flownpu::gpu {
namespace {

bool is_paged(const Node& node) { return node.integer(transformer::kPaged, 0) != 0; }

transformer::Decoder read_decoder(const Node& node) {
  transformer::Decoder decoder = transformer::Decoder::read(node);
  const std::size_t tables = is_paged(node) ? 1 : 0;
  transformer::check_values_of_decoder(
      node, decoder,
      tables + transformer::count_of_state_inputs(decoder) + count_of_constants(decoder));
  return decoder;
}

// The number of positions for which a run's cache should have room: that of the caller's tensors,
// which fit a whole conversation if past and present share memory.
std::int64_t room_of(const transformer::Decoder& decoder, std::span<const Tensor> presents,
                     std::int64_t total) {
  std::int64_t room = total;
  for (std::size_t layer = 0; layer < decoder.attentions(); ++layer) {
    if (!decoder.attention(layer).window_sized_cache)
      room = std::max(room, presents[2 * layer].shape[2]);
  }
  return room;
}

std::string positions_text(const transformer::SequenceTokens& tokens) {
  const std::string first = std::to_string(tokens.past);
  return tokens.count == 1 ? "position " + first
                           : "positions " + first + "-" + std::to_string(tokens.total() - 1);
}

// The tokens of the largest block.
std::int64_t largest_of(std::span<const std::int32_t> blocks) {
  std::int64_t largest = 0;
  while (!blocks.empty()) {
    const std::int64_t block = tokens_of_block(blocks);
    largest = std::max(largest, block);
    blocks = blocks.subspan(static_cast<std::size_t>(block));
  }
  return largest;
}

// For each of these tokens, the number of them that it sees; empty if no two are in one block.
std::vector<std::int32_t> ends_of(std::span<const std::int32_t> blocks, std::int64_t first,
                                  std::int64_t count) {
  if (blocks.empty()) return {};
  const auto these =
      blocks.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count));
  std::vector<std::int32_t> ends;
  bool has_blocks = false;
  while (ends.size() < these.size()) {
    const std::int64_t block = tokens_of_block(these.subspan(ends.size()));
    has_blocks = has_blocks || block > 1;
    ends.insert(ends.end(), static_cast<std::size_t>(block),
                static_cast<std::int32_t>(std::ssize(ends) + block));
  }
  return has_blocks ? ends : std::vector<std::int32_t>();
}

}  // namespace

DecoderStep::DecoderStep(const Node& node, std::shared_ptr<Context> context,
                         const DeviceOptions& options)
    : decoder_(read_decoder(node)),
      context_(std::move(context)),
      constants_(place_constants(*context_, decoder_, node)),
      pass_(context_, decoder_, constants_,
            {.cache = node.inputs[transformer::kFirstPast].type,
             .activations = options.activations,
             .dtype = options.gpu_dtype,
             .weights = options.gpu_weights,
             .matrices = options.gpu_matrices,
             .paged = is_paged(node)}) {
  const DataType type = node.inputs[transformer::kFirstPast].type;
  if (is_paged(node)) {
    paged_ = std::make_shared<PagedCaches>(context_, decoder_, type);
    return;
  }
  caches_ = std::make_shared<transformer::KvCaches>(
      decoder_,
      [used = context_, decoder = decoder_, type]() -> std::unique_ptr<transformer::CacheMemory> {
        return std::make_unique<DeviceCacheMemory>(used, decoder, type);
      });
}

void DecoderStep::infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const {
  if (paged_ != nullptr) return paged_->infer(inputs, outputs, ForwardPass::most_tokens(decoder_));
  transformer::check_call(decoder_, inputs);
  const std::int64_t batch = inputs[transformer::kHidden].shape[0];
  if (const std::int64_t most = ForwardPass::most_tokens(decoder_); batch > most)
    unsupported("expected at most ", most, " sequences, which the GPU computes at once, got ",
                batch, ": run fewer at a time, or set the provider option on_unsupported to cpu");
  for (std::int64_t sequence = 0; sequence < batch; ++sequence) {
    const transformer::SequenceTokens tokens = transformer::tokens_of(decoder_, inputs, sequence);
    check_block_numbers(blocks_of(inputs, sequence, tokens.count), "", sequence);
  }
  transformer::infer_outputs(decoder_, inputs, outputs);
}

std::span<const std::int32_t> DecoderStep::blocks_of(std::span<const Tensor> inputs,
                                                     std::int64_t sequence,
                                                     std::int64_t count) const {
  if (!decoder_.attention().bidirectional_blocks || count == 1) return {};
  const Tensor& blocks = inputs[transformer::kFirstPast + 2 * decoder_.attentions()];
  return {blocks.as<const std::int32_t>() + sequence * blocks.shape[1],
          static_cast<std::size_t>(count)};
}

// A block is computed at once, however large it is.
void DecoderStep::make_room(std::span<const Tensor> inputs) const {
  if (!decoder_.attention().bidirectional_blocks) return;
  for (std::int64_t sequence = 0; sequence < inputs[transformer::kHidden].shape[0]; ++sequence) {
    const std::int64_t count = transformer::tokens_of(decoder_, inputs, sequence).count;
    pass_.make_room(largest_of(blocks_of(inputs, sequence, count)));
  }
}

std::int64_t DecoderStep::some_of(const Sequence& sequence, std::int64_t token, std::int64_t most) {
  const std::int64_t left = sequence.tokens.count - token;
  if (left <= most || sequence.blocks.empty()) return std::min(left, most);
  std::int64_t whole = 0;
  while (whole < most) {
    const std::int64_t block =
        tokens_of_block(sequence.blocks.subspan(static_cast<std::size_t>(token + whole)));
    if (whole + block > most) break;
    whole += block;
  }
  return whole;
}

std::vector<Tensor> DecoderStep::parts_of(std::span<const Tensor> tensors,
                                          std::int64_t sequence) const {
  std::vector<Tensor> parts;
  for (const Tensor& tensor : tensors) parts.push_back(transformer::sequence_of(tensor, sequence));
  return parts;
}

std::vector<DecoderStep::Sequence> DecoderStep::begin(std::span<const Tensor> inputs,
                                                      std::span<const Tensor> outputs) const {
  const std::size_t parts = 2 * decoder_.attentions();
  const auto pasts = inputs.subspan(transformer::kFirstPast, parts);
  const auto presents = outputs.subspan(transformer::kFirstPresent, parts);
  const std::int64_t batch = inputs[transformer::kHidden].shape[0];
  std::vector<Tensor> firsts;
  firsts.reserve(static_cast<std::size_t>(batch));
  for (std::int64_t sequence = 0; sequence < batch; ++sequence)
    firsts.push_back(transformer::sequence_of(pasts.front(), sequence));
  const auto held = caches_->hold(firsts);
  std::vector<Sequence> sequences;
  for (std::int64_t sequence = 0; sequence < batch; ++sequence) {
    const transformer::SequenceTokens tokens = transformer::tokens_of(decoder_, inputs, sequence);
    std::shared_ptr<transformer::KvCache> cache =
        caches_->begin(parts_of(pasts, sequence), parts_of(presents, sequence), tokens.past,
                       room_of(decoder_, presents, tokens.total()));
    auto& memory = static_cast<DeviceCacheMemory&>(cache->memory());
    sequences.push_back({tokens, sequence * inputs[transformer::kHidden].shape[1], &memory,
                         std::move(cache), blocks_of(inputs, sequence, tokens.count)});
  }
  return sequences;
}

std::vector<DecoderStep::Sequence> DecoderStep::begin_paged(std::span<const Tensor> inputs,
                                                            std::span<const Tensor> outputs) const {
  paged_->begin(inputs, outputs);
  std::vector<Sequence> sequences;
  for (const cpu::PagedSequence& one : paged_->sequences(inputs))
    sequences.push_back({{.past = one.past, .count = one.tokens}, one.first, &paged_->memory()});
  return sequences;
}

transformer::SequenceTokens DecoderStep::first_tokens(std::span<const Tensor> inputs) const {
  if (paged_ == nullptr) return transformer::tokens_of(decoder_, inputs, 0);
  const cpu::PagedSequence first = paged_->sequences(inputs).front();
  return {.past = first.past, .count = first.tokens};
}

// The tokens of all sequences follow one another and are cut into chunks. If a sequence ends before
// the last chunk, its last token is kept until all chunks have run.
void DecoderStep::compute(std::span<const Tensor> inputs, std::span<const Sequence> sequences,
                          const Tensor& logits) const {
  const Tensor& hidden = inputs[transformer::kHidden];
  const auto count = static_cast<std::int64_t>(sequences.size());
  const bool one_each = std::ranges::all_of(
      sequences, [](const Sequence& sequence) { return sequence.tokens.count == 1; });
  std::vector<Segment> segments;
  std::vector<std::int64_t> places;  // the number of each segment's first token among all given
  std::vector<std::pair<std::int64_t, std::int64_t>> ends;  // sequence, token of the chunk
  std::int64_t tokens = 0;
  const auto run_chunk = [&] {
    pass_.run_layers(tokens, segments);
    for (const auto& [sequence, token] : ends) {
      if (!one_each && !decoder_.all_logits) pass_.keep_last(sequence, token);
    }
    if (decoder_.all_logits) pass_.run_head(tokens, false);
    for (std::size_t i = 0; i < segments.size() && decoder_.all_logits; ++i)
      read_all_logits(segments[i], places[i], logits);
    segments.clear();
    places.clear();
    ends.clear();
    tokens = 0;
  };
  for (std::int64_t i = 0; i < count; ++i) {
    const Sequence& sequence = sequences[static_cast<std::size_t>(i)];
    for (std::int64_t token = 0; token < sequence.tokens.count;) {
      const std::int64_t some = some_of(sequence, token, pass_.most_tokens() - tokens);
      if (some == 0) {  // The next block goes into the next chunk, uncut.
        run_chunk();
        continue;
      }
      const float* rows = hidden.as<const float>() + (sequence.row + token) * decoder_.hidden;
      pass_.write_hidden(tokens, {rows, static_cast<std::size_t>(some * decoder_.hidden)});
      const std::vector<std::int32_t> seen = ends_of(sequence.blocks, token, some);
      if (!seen.empty()) pass_.write_ends(tokens, seen);
      places.push_back(sequence.row + token);
      segments.push_back(
          {tokens, some, sequence.tokens.past + token, sequence.memory, !seen.empty(),
           states_.empty() ? nullptr : &states_[static_cast<std::size_t>(i)], sequence.tokens.shift,
           paged_ == nullptr ? nullptr : &paged_->pages(), i});
      write_tables(inputs, segments.back());
      token += some;
      tokens += some;
      if (token == sequence.tokens.count) ends.emplace_back(i, tokens - 1);
      if (tokens == pass_.most_tokens()) run_chunk();
    }
  }
  if (tokens > 0) run_chunk();
  if (!decoder_.all_logits) pass_.run_head(count, !one_each);
}

void DecoderStep::write_tables(std::span<const Tensor> inputs, const Segment& segment) const {
  if (!decoder_.given_tables) return;
  const std::span<const Tensor> tables = transformer::given_tables(decoder_, inputs);
  for (std::size_t i = 0; i < tables.size(); i += 2) {
    const auto rows_of = [&](const Tensor& table) {
      const std::int64_t columns = table.shape[1];
      return std::span(table.as<const float>() + (segment.past + segment.shift) * columns,
                       static_cast<std::size_t>(segment.count * columns));
    };
    pass_.write_table(i / 2, segment.first, rows_of(tables[i]), rows_of(tables[i + 1]));
  }
}

void DecoderStep::read_all_logits(const Segment& segment, std::int64_t place,
                                  const Tensor& logits) const {
  pass_.read_logits({logits.as<float>() + place * decoder_.vocabulary,
                     static_cast<std::size_t>(segment.count * decoder_.vocabulary)},
                    segment.first);
}

void DecoderStep::finish(std::span<const Sequence> sequences,
                         std::span<const Tensor> outputs) const {
  if (paged_ != nullptr) return;
  const auto presents = outputs.subspan(transformer::kFirstPresent, 2 * decoder_.attentions());
  for (std::size_t i = 0; i < sequences.size(); ++i)
    caches_->finish(*sequences[i].cache, parts_of(presents, static_cast<std::int64_t>(i)),
                    sequences[i].tokens.total());
}

void DecoderStep::begin_states(std::span<const Tensor> inputs,
                               std::span<const Sequence> sequences) const {
  if (!decoder_.has_states()) return;
  inputs = inputs.first(inputs.size() - count_of_constants(decoder_));
  inputs = inputs.last(transformer::count_of_state_inputs(decoder_));
  std::vector<Tensor> pasts;
  for (const transformer::Layer& layer : decoder_.layers) {
    inputs = inputs.subspan(transformer::count_of_state_constants(layer));
    const std::size_t count = decoder_.states_of(layer).size();
    pasts.insert(pasts.end(), inputs.begin(), inputs.begin() + static_cast<std::ptrdiff_t>(count));
    inputs = inputs.subspan(count);
  }
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    const auto number = static_cast<std::int64_t>(i);
    transformer::check_tokens_of_states(inputs.front(), number, sequences[i].tokens.count);
    if (i == states_.size()) states_.emplace_back(*context_, decoder_);
    states_[i].write(*context_, parts_of(pasts, number));
  }
}

void DecoderStep::finish_states(std::span<const Tensor> outputs, std::size_t sequences) const {
  const auto presents = outputs.subspan(transformer::kFirstPresent + 2 * decoder_.attentions());
  for (std::size_t i = 0; i < sequences && decoder_.has_states(); ++i)
    states_[i].read(*context_, parts_of(presents, static_cast<std::int64_t>(i)));
}

void DecoderStep::run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
                      std::span<std::byte> /*scratch*/) const {
  const std::lock_guard lock(context_->mutex());
  const ObservedRun observed(*context_, positions_text(first_tokens(inputs)));
  try {
    make_room(inputs);
    const std::vector<Sequence> sequences =
        paged_ == nullptr ? begin(inputs, outputs) : begin_paged(inputs, outputs);
    begin_states(inputs, sequences);
    const Tensor& logits = outputs[transformer::kLogits];
    const std::span all(logits.as<float>(), static_cast<std::size_t>(logits.shape.elements()));
    if (decoder_.all_logits) std::ranges::fill(all, 0.0F);  // those of padding
    compute(inputs, sequences, logits);
    if (!decoder_.all_logits) pass_.read_logits(all);
    finish_states(outputs, sequences.size());
    finish(sequences, outputs);
  } catch (const GpuError& error) {
    throw GpuError(error.failure(),
                   std::string(error.what()) + " (" + positions_text(first_tokens(inputs)) + ")");
  }
}

std::string describe_decoder(const Node& node, Context& context, GpuDtype dtype) {
  const transformer::Decoder decoder = read_decoder(node);
  const DeviceFacts& facts = context.facts();
  const std::size_t constants = count_of_constants(decoder);
  const std::lock_guard lock(context.mutex());
  const StoredType stored = choose_stored_type(context, dtype);
  const Value& first = node.inputs[node.inputs.size() - constants];
  const bool is_in_place = in_place(context, first).handle() != nullptr;
  std::int64_t bytes = ForwardPass::activation_bytes(decoder, stored);
  for (auto value = node.inputs.end() - static_cast<std::ptrdiff_t>(constants);
       value != node.inputs.end(); ++value)
    bytes += value->shape.value_or(Shape{0}).elements() *
             static_cast<std::int64_t>(size_of(value->type));
  if (bytes > facts.memory)
    fail("expected weights and activations that fit ", facts.title(), ", which has ", facts.memory,
         " bytes, got ", bytes, ": use device = cpu");
  return std::to_string(decoder.layer_count()) +
         (decoder.layer_count() == 1 ? " layer" : " layers") + " and the LM head in " +
         std::to_string(ForwardPass::dispatches_of(decoder)) +
         " kernels a token, prompts in chunks of " +
         std::to_string(ForwardPass::most_tokens(decoder)) + "; weights " +
         (is_in_place ? "read where the file is mapped" : "copied once") +
         "; activations stored as " + stored.text();
}

}  // namespace flownpu::gpu
