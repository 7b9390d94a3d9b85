// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/decoder/paged_caches.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "ops/error.h"
#include "ops/nodes/contract.h"
#include "ops/nodes/flow_qkv_attention.h"

namespace flownpu::gpu {
namespace {

cpu::AttentionAttributes attributes_of(const transformer::Decoder& decoder) {
  Node node;
  node.name = transformer::kDecoderLayers;
  node.op_type = kPagedAttention.op_type;
  node.domain = kDomain;
  node.attributes = {{"num_heads", decoder.attention().heads},
                     {"kv_num_heads", decoder.attention().kv_heads},
                     {"head_size", decoder.attention().head_size},
                     {"do_rotary", std::int64_t{1}}};
  return cpu::AttentionAttributes(node);
}

// The bytes of a tensor [P, S, G, d] at a row of a page, in one head.
std::byte* at(const Tensor& tensor, std::int64_t page, std::int64_t row, std::int64_t head) {
  const std::int64_t place = (page * tensor.shape[1] + row) * tensor.shape[2] + head;
  return tensor.as<std::byte>() +
         place * tensor.shape[3] * static_cast<std::int64_t>(size_of(tensor.type));
}

}  // namespace

std::optional<PagedCaches::Ticket> PagedCaches::Ticket::read(const Tensor& tensor) {
  if (tensor.data == nullptr || tensor.shape.rank() != 4 || tensor.bytes() < sizeof(Ticket))
    return std::nullopt;
  Ticket ticket;
  std::memcpy(&ticket, tensor.data, sizeof(ticket));
  return ticket.magic == Ticket().magic ? std::optional(ticket) : std::nullopt;
}

PagedCaches::PagedCaches(std::shared_ptr<Context> context, const transformer::Decoder& decoder,
                         DataType type)
    : context_(std::move(context)),
      decoder_(decoder),
      type_(type),
      attributes_(attributes_of(decoder)) {}

std::size_t PagedCaches::row_bytes() const {
  return static_cast<std::size_t>(cache_row_bytes(type_, decoder_.attention().head_size));
}

std::span<const Tensor> PagedCaches::pasts_of(std::span<const Tensor> inputs) const {
  return inputs.subspan(transformer::kFirstPast, 2 * decoder_.attentions());
}

// Those of the first layer's PagedAttention; the other layers' lengths and pages are the same.
std::array<Tensor, kPagedSinCache + 1> PagedCaches::inputs_of_attention(
    std::span<const Tensor> inputs) const {
  const std::span<const Tensor> pasts = pasts_of(inputs);
  const Tensor& hidden = inputs[transformer::kHidden];
  std::array<Tensor, kPagedSinCache + 1> given;
  given[kPagedQuery] = {.data = hidden.data, .shape = {hidden.shape[0], decoder_.packed_heads()}};
  given[kKeyCache] = pasts[0];
  given[kValueCache] = pasts[1];
  given[kCumulativeSequenceLengths] = inputs[transformer::kTotalTokens];
  given[kPastSequenceLengths] = inputs[transformer::kTokensBeforeLast];
  given[kBlockTable] = inputs[transformer::kFirstPast + pasts.size()];
  const std::int64_t turned =
      decoder_.partly_rotated() ? decoder_.rotated_size : decoder_.attention().head_size;
  given[kPagedCosCache].shape = given[kPagedSinCache].shape = {decoder_.positions, turned / 2};
  return given;
}

void PagedCaches::infer(std::span<const Tensor> inputs, std::span<Shape> outputs,
                        std::int64_t most) const {
  const Shape& hidden = inputs[transformer::kHidden].shape;
  if (hidden.rank() != 2 || hidden[1] != decoder_.hidden)
    fail("expected hidden states of shape [tokens, ", decoder_.hidden, "], got ",
         to_string(hidden));
  const auto given = inputs_of_attention(inputs);
  check_shapes(kPagedAttention, attributes_.name, given);
  const cpu::PagedCall call(attributes_, given, {});
  cpu::check_paged_call(attributes_, call);
  if (call.sequences() < 1 || call.sequences() > most)
    unsupported("expected 1 to ", most, " sequences, which the GPU computes at once, got ",
                call.sequences(), ": set the provider option on_unsupported to cpu");
  for (std::int64_t i = 0; i < call.sequences(); ++i)
    if (call.sequence(i).tokens == 0)
      unsupported("expected a new token of each sequence, got none of sequence ", i,
                  ": leave it out, or set the provider option on_unsupported to cpu");
  outputs[transformer::kLogits] = {call.sequences(), decoder_.vocabulary};
  const std::span<const Tensor> pasts = pasts_of(inputs);
  for (std::size_t part = 0; part < pasts.size(); ++part) {
    if (!(pasts[part].shape == pasts[0].shape))
      fail("expected caches of shape ", to_string(pasts[0].shape), " in all layers, got ",
           to_string(pasts[part].shape), " in layer ", part / 2);
    outputs[transformer::kFirstPresent + part] = pasts[part].shape;
  }
}

std::vector<cpu::PagedSequence> PagedCaches::sequences(std::span<const Tensor> inputs) const {
  const auto given = inputs_of_attention(inputs);
  const cpu::PagedCall call(attributes_, given, {});
  std::vector<cpu::PagedSequence> all;
  all.reserve(static_cast<std::size_t>(call.sequences()));
  for (std::int64_t i = 0; i < call.sequences(); ++i) all.push_back(call.sequence(i));
  return all;
}

bool PagedCaches::is_known(const Tensor& first) const {
  const auto ticket = Ticket::read(first);
  return ticket && cache_ && ticket->cache == cache_->id && first.shape == cache_->shape;
}

void PagedCaches::make(std::span<const Tensor> pasts) {
  const Shape& shape = pasts.front().shape;
  cache_.reset();  // Its memory is needed.
  DeviceCacheMemory memory(context_, decoder_, type_);
  memory.reserve(shape[0] * shape[1]);
  cache_ =
      std::make_unique<Cache>(Cache{.id = random_(),
                                    .shape = shape,
                                    .memory = std::move(memory),
                                    .pages = std::vector<bool>(static_cast<std::size_t>(shape[0])),
                                    .covered = {}});
  for (std::size_t part = 0; part < pasts.size(); ++part) {
    const Ticket ticket{.cache = cache_->id, .part = part};
    std::memcpy(cache_->covered.emplace_back().data(), pasts[part].data, sizeof(ticket));
    std::memcpy(pasts[part].data, &ticket, sizeof(ticket));
  }
}

void PagedCaches::begin(std::span<const Tensor> inputs, std::span<const Tensor> outputs) {
  const std::span<const Tensor> pasts = pasts_of(inputs);
  for (std::size_t part = 0; part < pasts.size(); ++part)
    if (outputs[transformer::kFirstPresent + part].data != pasts[part].data)
      unsupported(
          "expected present keys and values in the memory of the past ones, as ORT GenAI's "
          "engine has them: bind them so, or set the provider option on_unsupported to cpu");
  const std::vector<cpu::PagedSequence> all = sequences(inputs);
  if (!is_known(pasts.front())) {
    // A ticket that another cache left is what memory happened to hold, unless something was kept.
    if (Ticket::read(pasts.front()) &&
        std::ranges::any_of(all, [](const auto& one) { return one.past > 0; }))
      fail("[FlowNPU] a past stands for a KV cache that is gone: begin the conversations anew");
    make(pasts);
  }
  const std::int64_t rows = cache_->shape[1];
  for (const cpu::PagedSequence& sequence : all) {
    for (std::int64_t i = 0; i * rows < sequence.past + sequence.tokens; ++i) {
      const auto page = static_cast<std::size_t>(sequence.table[i]);
      if (!cache_->pages[page] && i * rows < sequence.past) take(pasts, sequence.table[i]);
      cache_->pages[page] = true;
    }
  }
  write_pages(inputs);
}

void PagedCaches::write_pages(std::span<const Tensor> inputs) {
  const Tensor& table = inputs[transformer::kFirstPast + 2 * decoder_.attentions()];
  if (pages_.table.bytes() < table.bytes()) {
    context_->wait();  // Before what kernels use is freed.
    pages_.table = context_->allocate(table.bytes());
  }
  context_->write(pages_.table, {table.as<const std::byte>(), table.bytes()});
  pages_.columns = table.shape[1];
  pages_.rows = cache_->shape[1];
}

std::vector<std::byte> PagedCaches::gathered(const Tensor& tensor, std::size_t part,
                                             std::int64_t page, std::int64_t head) const {
  std::vector<std::byte> rows;
  for (std::int64_t row = 0; row < tensor.shape[1]; ++row) {
    const std::byte* from = at(tensor, page, row, head);
    rows.insert(rows.end(), from, from + row_bytes());
  }
  if (page == 0 && head == 0) std::ranges::copy(cache_->covered[part], rows.begin());
  return rows;
}

void PagedCaches::take(std::span<const Tensor> pasts, std::int64_t page) {
  const std::int64_t rows = cache_->shape[1];
  for (std::size_t part = 0; part < pasts.size(); ++part)
    for (std::int64_t head = 0; head < cache_->shape[2]; ++head)
      cache_->memory.write({part, head, page * rows, rows},
                           gathered(pasts[part], part, page, head).data(), type_);
}

void PagedCaches::restore(const Tensor& tensor) {
  const auto ticket = Ticket::read(tensor);
  if (!ticket || !is_known(tensor)) return;
  const auto part = static_cast<std::size_t>(ticket->part);
  const auto rows = cache_->shape[1];
  std::vector<std::byte> read(static_cast<std::size_t>(rows) * row_bytes());
  // The ticket, which is in page 0, goes last: it stays where the device fails.
  for (std::int64_t page = cache_->shape[0]; page-- > 0;) {
    if (!cache_->pages[static_cast<std::size_t>(page)]) continue;
    for (std::int64_t head = cache_->shape[2]; head-- > 0;) {
      cache_->memory.read({part, head, page * rows, rows}, read.data(), type_);
      for (std::int64_t row = 0; row < rows; ++row)
        std::memcpy(at(tensor, page, row, head),
                    read.data() + static_cast<std::size_t>(row) * row_bytes(), row_bytes());
    }
  }
  if (!cache_->pages.front())
    std::memcpy(tensor.data, cache_->covered[part].data(), sizeof(Ticket));
}

}  // namespace flownpu::gpu
