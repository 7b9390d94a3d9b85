// SPDX-License-Identifier: Apache-2.0
#include "ops/transformer/cache/kv_caches.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "ops/cancellation.h"
#include "ops/dispatch_observer.h"
#include "ops/error.h"
#include "ops/nodes/flow_qkv_attention.h"

namespace flownpu::transformer {
namespace {

bool may_hold(const Tensor& tensor, std::size_t bytes) {
  const DataType type = tensor.type;
  const bool is_cache = type == DataType::kBFloat16 || type == DataType::kFloat16 ||
                        type == DataType::kFloat32 || type == DataType::kInt8;
  return tensor.data != nullptr && is_cache && tensor.shape.rank() == 4 && tensor.bytes() >= bytes;
}

}  // namespace

std::int64_t resident(std::int64_t total, std::int64_t capacity, std::int64_t window) {
  if (total <= capacity) return total;
  const std::int64_t evicted_at_once = capacity - window + 1;
  return total - evicted_at_once * ((total - capacity + evicted_at_once - 1) / evicted_at_once);
}

Tensor sequence_of(const Tensor& cache, std::int64_t row) {
  Tensor sequence = cache;
  sequence.shape[0] = 1;
  if (cache.data != nullptr)
    sequence.data = cache.as<std::byte>() + static_cast<std::size_t>(row) * sequence.bytes();
  return sequence;
}

std::optional<KvCaches::Ticket> KvCaches::Ticket::read(const Tensor& tensor) {
  Ticket ticket;
  if (!may_hold(tensor, sizeof ticket)) return std::nullopt;
  std::memcpy(&ticket, tensor.data, sizeof ticket);
  if (ticket.magic != kMagic) return std::nullopt;
  return ticket;
}

std::int64_t KvCache::untouched_since(std::uint64_t version, bool finished) const {
  for (const Write& write : writes_) {  // positions rise with versions
    if (write.version > version && (!finished || write.version <= finished_)) return write.first;
  }
  return std::numeric_limits<std::int64_t>::max();
}

std::int64_t KvCache::rows_of(std::size_t device, std::uint64_t version) const {
  if (device >= held_.size() || held_[device].memory == nullptr) return 0;
  return std::min(held_[device].rows, version == version_ ? std::numeric_limits<std::int64_t>::max()
                                                          : untouched_since(version, false));
}

void KvCache::write_from(std::int64_t first) {
  while (!writes_.empty() && writes_.back().first >= first) writes_.pop_back();
  writes_.push_back({++version_, first});
  for (Held& held : held_) {
    held.rows = std::min(held.rows, first);
    held.gaps = held.gaps_in(0, first);
  }
  tensor_rows_ = std::min(tensor_rows_, first);
}

std::vector<KvCache::Positions> KvCache::Held::gaps_in(std::int64_t first, std::int64_t end) const {
  std::vector<Positions> found;
  for (const Positions& gap : gaps) {
    const Positions part{std::max(gap.first, first), std::min(gap.end, end)};
    if (part.first < part.end) found.push_back(part);
  }
  return found;
}

KvCaches::KvCaches(const Decoder& decoder, const Maker& make)
    : decoder_(decoder), shared_(std::make_shared<Shared>()) {
  shared_->makers.push_back(make);
}

// The position whose key or value row 0 of a tensor holds when there are `total` tokens.
std::int64_t KvCaches::first_row(const Tensor& tensor, std::size_t layer,
                                 std::int64_t total) const {
  const Attention& kind = decoder_.attention(layer);
  if (!kind.window_sized_cache) return 0;
  return total - resident(total, tensor.shape[2], kind.window);
}

// For each head, calls move(rows of the cache, address of these rows in the tensor) for those of
// the positions from .. to - 1 that the tensor has room for. `part`: as in a ticket; `total`: the
// number of tokens that the tensor stands for.
void KvCaches::for_rows(const Tensor& tensor, std::size_t part, std::int64_t from, std::int64_t to,
                        std::int64_t total,
                        const std::function<void(const CacheRows&, std::byte*)>& move) const {
  const std::int64_t capacity = tensor.shape[2];
  const std::int64_t base = first_row(tensor, part / 2, total);
  const auto row_bytes =
      static_cast<std::size_t>(cache_row_bytes(tensor.type, decoder_.attention().head_size));
  const std::int64_t first = std::max(from, base);
  const std::int64_t count = std::min(to, base + capacity) - first;
  if (count <= 0) return;
  for (std::int64_t head = 0; head < decoder_.attention().kv_heads; ++head) {
    const auto row = static_cast<std::size_t>(head * capacity + first - base);
    move(CacheRows{.part = part, .head = head, .first = first, .count = count},
         tensor.as<std::byte>() + row * row_bytes);
  }
}

void KvCaches::check(const Tensor& past, std::size_t layer, std::int64_t total) const {
  const Attention& kind = decoder_.attention(layer);
  if (kind.window_sized_cache || past.shape[2] >= total) return;
  fail("expected a past of at least ", total, " positions in layer ", layer, ", got ",
       past.shape[2]);
}

// Copies positions from .. to - 1 of tensors that stand for `past` positions to the memory of the
// device that runs.
void KvCaches::upload(KvCache& cache, std::span<const Tensor> pasts, std::int64_t from,
                      std::int64_t to, std::int64_t past) const {
  HandOver observed("the caller's tensors to the device", from, to);
  for (std::size_t part = 0; part < pasts.size(); ++part) {
    check_cancelled();
    check(pasts[part], part / 2, past);
    for_rows(pasts[part], part, from, to, past, [&](const CacheRows& rows, const std::byte* at) {
      cache.memory().write(rows, at, pasts[part].type);
      observed.to_device(bytes_of(rows, pasts[part].type));
    });
  }
  for (std::size_t layer = 0; layer < pasts.size() / 2; ++layer)
    cache.memory().written(layer, from, to - from);
}

// The ticket that all of a run's pasts share; nullopt if none has one. Throws Error if they differ.
std::optional<KvCaches::Ticket> KvCaches::ticket_of(std::span<const Tensor> pasts) const {
  const std::optional<Ticket> first = Ticket::read(pasts.front());
  for (std::size_t part = 0; part < pasts.size(); ++part) {
    const std::optional<Ticket> ticket = Ticket::read(pasts[part]);
    const bool same =
        ticket.has_value() == first.has_value() &&
        (!ticket || (ticket->cache == first->cache && ticket->part == part &&
                     ticket->version == first->version && ticket->in_tensor == first->in_tensor));
    if (!same) {
      fail("expected past keys and values that one run made, each in its place; the past ",
           part % 2 == 0 ? "key" : "value", " of layer ", part / 2,
           " is another's: pass the present tensors of one run");
    }
  }
  return first;
}

std::shared_ptr<KvCache> KvCaches::find(std::uint64_t id) {
  auto& caches = shared_->caches;
  const auto found =
      std::ranges::find_if(caches, [&](const auto& cache) { return cache->id_ == id; });
  if (found == caches.end()) return nullptr;
  std::rotate(found, found + 1, caches.end());
  return caches.back();
}

// The cache whose most recent ticket is in one of the tensors; null if there is none.
std::shared_ptr<KvCache> KvCaches::find_newest(std::span<const Tensor> tensors) {
  for (const Tensor& tensor : tensors) {
    const std::optional<Ticket> ticket = Ticket::read(tensor);
    if (!ticket) continue;
    const std::shared_ptr<KvCache> cache = find(ticket->cache);
    if (cache != nullptr && cache->version_ == ticket->version) return cache;
  }
  return nullptr;
}

std::shared_ptr<KvCache> KvCaches::make() {
  auto& caches = shared_->caches;
  auto made = std::make_shared<KvCache>(shared_->random());
  const auto idle = std::ranges::find_if(
      caches, [](const std::shared_ptr<KvCache>& cache) { return cache.use_count() == 1; });
  if (caches.size() >= kMost && idle != caches.end()) {
    // Reuses the memory of the least recently used idle cache as it is: the rows of a cache that
    // are not yet written may hold any numbers.
    made->held_ = std::move((*idle)->held_);
    caches.erase(idle);
  }
  for (KvCache::Held& held : made->held_) {
    held.rows = 0;
    held.gaps.clear();
  }
  caches.push_back(std::move(made));
  return caches.back();
}

// Makes room in the memory of this device, for which a run begins.
void KvCaches::reserve(KvCache& cache, std::int64_t room) const {
  if (cache.held_.size() <= device_) cache.held_.resize(device_ + 1);
  KvCache::Held& held = cache.held_[device_];
  if (held.memory == nullptr) held.memory = shared_->makers[device_]();
  held.memory->reserve(room);
  cache.running_ = device_;
}

std::vector<std::shared_ptr<KvCache>> KvCaches::hold(std::span<const Tensor> tensors) {
  const std::lock_guard lock(shared_->mutex);
  std::vector<std::shared_ptr<KvCache>> held;
  for (const Tensor& tensor : tensors) {
    const std::optional<Ticket> ticket = Ticket::read(tensor);
    if (ticket) held.push_back(find(ticket->cache));
  }
  return held;
}

std::shared_ptr<KvCache> KvCaches::begin(std::span<const Tensor> pasts,
                                         std::span<const Tensor> presents, std::int64_t past,
                                         std::int64_t room) {
  const std::lock_guard lock(shared_->mutex);
  if (past > 0) {
    if (const std::optional<Ticket> ticket = ticket_of(pasts))
      return continued(*ticket, pasts, past, room);
  }
  for (std::size_t part = 0; past > 0 && part < pasts.size(); ++part)
    check(pasts[part], part / 2, past);
  std::shared_ptr<KvCache> cache = past > 0 ? nullptr : find_newest(pasts.first(1));
  if (past == 0 && cache == nullptr) cache = find_newest(presents.first(1));
  if (cache == nullptr) cache = make();
  reserve(*cache, room);
  if (past > 0) upload(*cache, pasts, 0, past, past);
  cache->write_from(past);
  cache->held_[device_].rows = past;
  return cache;
}

// The cache for a run over pasts with this ticket.
std::shared_ptr<KvCache> KvCaches::continued(const Ticket& ticket, std::span<const Tensor> pasts,
                                             std::int64_t past, std::int64_t room) {
  const std::shared_ptr<KvCache> source = find(ticket.cache);
  if (source == nullptr) {
    fail("the past stands for a KV cache that is gone: a session keeps those of the ", kMost,
         " conversations that were used last; begin this one anew with all its tokens");
  }
  const std::int64_t held = std::min<std::int64_t>(ticket.length, past);
  // Another run went on from a copy of these tensors: the cache is copied as well.
  const bool is_branch = ticket.version != source->version_;
  const std::int64_t has = std::min(source->rows_of(device_, ticket.version), held);
  if (has < held && ticket.in_tensor == 0) holder(*source, ticket, held);  // throws
  const std::shared_ptr<KvCache> cache = is_branch ? make() : source;
  reserve(*cache, room);
  if (is_branch && has > 0) cache->memory().copy(*source->held_[device_].memory, has);
  std::int64_t known = has;
  if (ticket.in_tensor == 0) {
    // A branch has gaps that nobody could fill later.
    take_over(*cache, *source, ticket, pasts.front().type, has, held,
              is_branch ? 0 : first_seen(past));
    known = held;
  }
  if (known < past) {
    for (std::size_t part = 0; ticket.in_tensor != 0 && part < pasts.size(); ++part)
      uncover(*source, ticket.version, part, pasts[part], ticket.length);
    upload(*cache, pasts, known, past, past);
  }
  cache->write_from(past);
  cache->held_[device_].rows = past;
  return cache;
}

void KvCaches::finish(KvCache& cache, std::span<const Tensor> presents, std::int64_t total) {
  const std::lock_guard lock(shared_->mutex);
  cache.finished_ = cache.version_;
  cache.held_[device_].rows = total;
  if (presents.front().data != cache.tensors_) cache.tensors_ = nullptr;
  Ticket ticket;
  ticket.cache = cache.id_;
  ticket.version = cache.version_;
  ticket.length = static_cast<std::uint32_t>(total);
  for (std::size_t part = 0; part < presents.size(); ++part)
    write_ticket(ticket, part, presents[part]);
}

void KvCaches::write_ticket(Ticket ticket, std::size_t part, const Tensor& tensor) {
  ticket.part = static_cast<std::uint32_t>(part);
  std::memcpy(tensor.data, &ticket, sizeof ticket);
}

bool KvCaches::has_ticket(const Tensor& tensor) { return Ticket::read(tensor).has_value(); }

bool KvCaches::restore(const Tensor& tensor) {
  const std::lock_guard lock(shared_->mutex);
  const std::optional<Ticket> ticket = Ticket::read(tensor);
  if (!ticket) return false;
  const std::shared_ptr<KvCache> cache = find(ticket->cache);
  if (cache == nullptr) return false;
  const std::int64_t length = ticket->length;
  if (ticket->in_tensor != 0) {
    uncover(*cache, ticket->version, ticket->part, tensor, length);
    return true;
  }
  if (cache->untouched_since(ticket->version, true) < length) {
    fail("the past of ", length, " tokens was overwritten from token ",
         cache->untouched_since(ticket->version, true),
         " on by a run that went back to there and on from there: pass that run's present");
  }
  // A failed run may have overwritten the positions that it had to compute; its repetition writes
  // them again.
  const std::int64_t held = std::min(length, cache->untouched_since(ticket->version, false));
  download(*cache, holder(*cache, *ticket, held), tensor, ticket->part, 0, held, length);
  return true;
}

std::size_t KvCaches::count() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->caches.size();
}

void CachesOfSteps::add(const std::shared_ptr<KvCaches>& caches) {
  const std::lock_guard lock(mutex_);
  caches_.push_back(caches);
}

std::shared_ptr<KvCaches> CachesOfSteps::newest() {
  const std::lock_guard lock(mutex_);
  return caches_.empty() ? nullptr : caches_.back().lock();
}

void CachesOfSteps::restore(std::span<const Tensor> tensors) {
  std::vector<std::shared_ptr<KvCaches>> all;
  {
    const std::lock_guard lock(mutex_);
    for (const std::weak_ptr<KvCaches>& caches : caches_) {
      if (std::shared_ptr<KvCaches> living = caches.lock()) all.push_back(std::move(living));
    }
  }
  for (const Tensor& tensor : tensors) {
    const std::int64_t rows = tensor.shape.rank() == 4 ? tensor.shape[0] : 0;
    for (std::int64_t row = 0; row < rows; ++row) {
      const Tensor sequence = sequence_of(tensor, row);
      if (!KvCaches::has_ticket(sequence)) continue;
      const bool found =
          std::ranges::any_of(all, [&](const auto& caches) { return caches->restore(sequence); });
      if (!found)
        fail("[FlowNPU] a past stands for a KV cache that is gone: begin the conversation anew");
    }
  }
}

}  // namespace flownpu::transformer
