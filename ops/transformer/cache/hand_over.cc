// SPDX-License-Identifier: Apache-2.0
// The parts of KvCaches (kv_caches.h) by which several devices, or a device and the host, compute
// one conversation.
#include <algorithm>
#include <cstring>
#include <utility>

#include "ops/cancellation.h"
#include "ops/dispatch_observer.h"
#include "ops/error.h"
#include "ops/nodes/flow_qkv_attention.h"
#include "ops/transformer/cache/kv_caches.h"

namespace flownpu::transformer {

void KvCaches::share(const KvCaches& other) {
  const Maker own = shared_->makers[device_];
  shared_ = other.shared_;
  const std::lock_guard lock(shared_->mutex);
  device_ = shared_->makers.size();
  shared_->makers.push_back(own);
}

std::size_t KvCaches::bytes_of(const CacheRows& rows, DataType type) const {
  return static_cast<std::size_t>(rows.count *
                                  cache_row_bytes(type, decoder_.attention().head_size));
}

// The device whose memory holds the first `rows` positions of a ticket's state.
std::size_t KvCaches::holder(const KvCache& cache, const Ticket& ticket, std::int64_t rows) const {
  std::int64_t most = 0;
  for (std::size_t device = 0; device < cache.held_.size(); ++device) {
    const std::int64_t has = cache.rows_of(device, ticket.version);
    if (has >= rows) return device;
    most = std::max(most, has);
  }
  fail("the past of ", rows, " tokens was overwritten from token ", most,
       " on by a run that went back to there and on from there: pass that run's present");
}

// Copies positions from .. to - 1 of a part to the tensor, in which they lie as in one of `total`
// positions.
void KvCaches::download(KvCache& cache, std::size_t device, const Tensor& tensor, std::size_t part,
                        std::int64_t from, std::int64_t to, std::int64_t total) const {
  CacheMemory& memory = *cache.held_[device].memory;
  memory.fetch(part, from, to - from);
  for_rows(tensor, part, from, to, total,
           [&](const CacheRows& rows, std::byte* at) { memory.read(rows, at, tensor.type); });
}

// The first position that layers with a window read for tokens from `past` on; 0 without such
// layers.
std::int64_t KvCaches::first_seen(std::int64_t past) const {
  std::int64_t widest = 0;
  for (std::size_t layer = 0; layer < decoder_.attentions(); ++layer)
    widest = std::max(widest, decoder_.attention(layer).window);
  return widest == 0 ? 0 : std::max<std::int64_t>(past + 1 - widest, 0);
}

// Copies the positions up to `held` that the device which runs lacks, it has the first `has`, from
// the memory of another: in layers with a window those from `seen` on.
void KvCaches::take_over(KvCache& cache, KvCache& source, const Ticket& ticket, DataType type,
                         std::int64_t has, std::int64_t held, std::int64_t seen) const {
  const KvCache::Held& before = (device_ < source.held_.size() ? source : cache).held_[device_];
  std::vector<KvCache::Positions> of_windows = before.gaps_in(seen, has);
  std::vector<KvCache::Positions> gaps = before.gaps_in(0, std::min(seen, has));
  if (has < seen && has < held) gaps.push_back({has, std::min(seen, held)});
  const KvCache::Positions all{has, held};
  if (std::max(has, seen) < held) of_windows.push_back({std::max(has, seen), held});
  const std::int64_t needed = has < held ? held : of_windows.empty() ? 0 : of_windows.back().end;
  if (needed == 0) return;
  std::size_t device = 0;
  while (device < source.held_.size() &&
         (device == device_ || source.rows_of(device, ticket.version) < needed))
    ++device;
  if (device == source.held_.size())
    fail("keys and values before position ", needed,
         " are in no device's memory: begin the conversation anew");
  move(cache, source, device, type, {&all, std::size_t{has < held}}, of_windows);
  cache.held_[device_].gaps = std::move(gaps);
}

// Copies positions of the memory of another device to that of the device that runs, through rows of
// the graph's type.
void KvCaches::move(KvCache& cache, KvCache& source, std::size_t device, DataType type,
                    std::span<const KvCache::Positions> all,
                    std::span<const KvCache::Positions> of_windows) const {
  CacheMemory& memory = *source.held_[device].memory;
  const std::unique_lock lock = memory.lock();
  const std::int64_t first =
      std::min(all.empty() ? of_windows.front().first : all.front().first,
               of_windows.empty() ? all.front().first : of_windows.front().first);
  HandOver observed("a device's memory to another's", first,
                    all.empty() ? of_windows.back().end : all.back().end);
  std::vector<std::byte> rows_of_head;
  for (std::size_t part = 0; part < 2 * decoder_.attentions(); ++part) {
    check_cancelled();
    const auto spans = decoder_.attention(part / 2).window > 0 ? of_windows : all;
    for (const auto& [from, to] : spans) {
      try {
        memory.fetch(part, from, to - from);
      } catch (const DeviceFailed& error) {
        fail(error.what(), ". Keys and values of this conversation were in the memory of that ",
             "device, and are lost with it: begin the conversation anew");
      }
      for (std::int64_t head = 0; head < decoder_.attention().kv_heads; ++head) {
        const CacheRows rows{.part = part, .head = head, .first = from, .count = to - from};
        rows_of_head.resize(bytes_of(rows, type));
        memory.read(rows, rows_of_head.data(), type);
        cache.memory().write(rows, rows_of_head.data(), type);
        observed.to_host(rows_of_head.size());
        observed.to_device(rows_of_head.size());
      }
      if (part % 2 == 1) cache.memory().written(part / 2, from, to - from);
    }
  }
}

// Puts the bytes under its ticket back into a tensor that holds everything else, in the order of
// `total` positions.
void KvCaches::uncover(const KvCache& cache, std::uint64_t version, std::size_t part,
                       const Tensor& tensor, std::int64_t total) const {
  const bool known = part < cache.covered_.size() &&
                     cache.covered_[part].position == first_row(tensor, part / 2, total) &&
                     cache.untouched_since(version, false) > cache.covered_[part].position;
  if (!known) {
    fail("the past of ", total, " tokens was overwritten from its beginning on by a run that went ",
         "back to there: pass that run's present");
  }
  std::memcpy(tensor.data, cache.covered_[part].bytes.data(), kTicketBytes);
}

std::shared_ptr<KvCache> KvCaches::lend(std::span<const Tensor> pasts, std::int64_t past) {
  const std::lock_guard lock(shared_->mutex);
  if (past == 0) return find_newest(pasts.first(1));
  const std::optional<Ticket> first = ticket_of(pasts);
  if (!first) return nullptr;
  const std::shared_ptr<KvCache> cache = find(first->cache);
  if (cache == nullptr) {
    fail("the past stands for a KV cache that is gone: a session keeps those of the ", kMost,
         " conversations that were used last; begin this one anew with all its tokens");
  }
  const bool is_newest = first->version == cache->version_;
  const std::int64_t held = std::min<std::int64_t>(first->length, past);
  if (first->in_tensor != 0) {
    for (std::size_t part = 0; part < pasts.size(); ++part)
      uncover(*cache, first->version, part, pasts[part], first->length);
    return is_newest ? cache : nullptr;
  }
  const bool wrote_these = is_newest && pasts.front().data == cache->tensors_;
  const std::int64_t known = wrote_these ? std::min(cache->tensor_rows_, held) : 0;
  const std::size_t device = holder(*cache, *first, held);
  const std::unique_lock lock_of_device = cache->held_[device].memory->lock();
  HandOver observed("the device to the caller's tensors", known, held);
  try {
    write_out(*cache, *first, device, pasts, past, known, observed);
  } catch (...) {
    // The copy failed or was cancelled: the tensors keep their tickets, and the device's memory
    // counts.
    cache->tensors_ = nullptr;
    for (std::size_t part = 0; part < pasts.size(); ++part) write_ticket(*first, part, pasts[part]);
    throw;
  }
  return is_newest ? cache : nullptr;
}

// The part of lend() that copies. The tensors hold the first `known` positions already.
void KvCaches::write_out(KvCache& cache, const Ticket& ticket, std::size_t device,
                         std::span<const Tensor> pasts, std::int64_t past, std::int64_t known,
                         HandOver& observed) const {
  const std::int64_t held = std::min<std::int64_t>(ticket.length, past);
  for (std::size_t part = 0; part < pasts.size(); ++part) {
    check_cancelled();
    const Tensor& tensor = pasts[part];
    check(tensor, part / 2, past);
    // Rows of a window-sized tensor move when their first position does.
    const bool in_place =
        known > 0 && cache.covered_[part].position == first_row(tensor, part / 2, past);
    if (in_place) uncover(cache, ticket.version, part, tensor, past);
    const std::int64_t from = in_place ? known : 0;
    if (from == held) continue;
    download(cache, device, tensor, part, from, held, past);
    for_rows(tensor, part, from, held, past, [&](const CacheRows& rows, const std::byte* /*at*/) {
      observed.to_host(bytes_of(rows, tensor.type));
    });
  }
}

void KvCaches::take_back(std::shared_ptr<KvCache> cache, std::span<const Tensor> presents,
                         std::int64_t past, std::int64_t total) {
  const std::lock_guard lock(shared_->mutex);
  if (cache == nullptr) cache = make();
  cache->write_from(past);
  cache->finished_ = cache->version_;
  cache->tensors_ = presents.front().data;
  cache->tensor_rows_ = total;
  cache->covered_.resize(presents.size());
  Ticket ticket;
  ticket.cache = cache->id_;
  ticket.version = cache->version_;
  ticket.length = static_cast<std::uint32_t>(total);
  ticket.in_tensor = 1;
  for (std::size_t part = 0; part < presents.size(); ++part) {
    KvCache::Covered& covered = cache->covered_[part];
    covered.position = first_row(presents[part], part / 2, total);
    std::memcpy(covered.bytes.data(), presents[part].data, kTicketBytes);
    write_ticket(ticket, part, presents[part]);
  }
}

}  // namespace flownpu::transformer
