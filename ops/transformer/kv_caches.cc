// SPDX-License-Identifier: Apache-2.0
#include "ops/transformer/kv_caches.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "ops/error.h"
#include "ops/nodes/flow_qkv_attention.h"

namespace flownpu::transformer {
namespace {

constexpr std::uint64_t kMagic = 0x5456'4b55'504e'4c46;  // "FLNPUKVT"

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

// The contents of a tensor's first row.
struct KvCaches::Ticket {
  std::uint64_t magic = kMagic;
  std::uint64_t cache = 0;
  std::uint64_t version = 0;
  std::uint32_t length = 0;
  std::uint32_t part = 0;  // 2 x layer, + 1 for values

  static std::optional<Ticket> read(const Tensor& tensor) {
    Ticket ticket;
    if (!may_hold(tensor, sizeof ticket)) return std::nullopt;
    std::memcpy(&ticket, tensor.data, sizeof ticket);
    if (ticket.magic != kMagic) return std::nullopt;
    return ticket;
  }
};

std::int64_t KvCache::untouched_since(std::uint64_t version, bool finished) const {
  for (const Write& write : writes_) {  // positions rise with versions
    if (write.version > version && (!finished || write.version <= finished_)) return write.first;
  }
  return std::numeric_limits<std::int64_t>::max();
}

KvCaches::KvCaches(const Decoder& decoder, Maker make)
    : decoder_(decoder), make_(std::move(make)), random_(std::random_device{}()) {}

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
template <typename Move>
void KvCaches::for_rows(const Tensor& tensor, std::size_t part, std::int64_t from, std::int64_t to,
                        std::int64_t total, const Move& move) const {
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

void KvCaches::upload(KvCache& cache, std::span<const Tensor> pasts, std::int64_t from,
                      std::int64_t to, std::int64_t past) const {
  for (std::size_t part = 0; part < pasts.size(); ++part) {
    check(pasts[part], part / 2, past);
    for_rows(pasts[part], part, from, to, past, [&](const CacheRows& rows, const std::byte* at) {
      cache.memory().write(rows, at, pasts[part].type);
    });
  }
  cache.memory().written(from, to - from);
}

// The ticket that all of a run's pasts share; nullopt if none has one. Throws Error if they differ.
std::optional<KvCaches::Ticket> KvCaches::ticket_of(std::span<const Tensor> pasts) const {
  const std::optional<Ticket> first = Ticket::read(pasts.front());
  for (std::size_t part = 0; part < pasts.size(); ++part) {
    const std::optional<Ticket> ticket = Ticket::read(pasts[part]);
    const bool same = ticket.has_value() == first.has_value() &&
                      (!ticket || (ticket->cache == first->cache && ticket->part == part &&
                                   ticket->version == first->version));
    if (!same) {
      fail("expected past keys and values that one run made, each in its place; the past ",
           part % 2 == 0 ? "key" : "value", " of layer ", part / 2,
           " is another's: pass the present tensors of one run");
    }
  }
  return first;
}

std::shared_ptr<KvCache> KvCaches::find(std::uint64_t id) {
  const auto found =
      std::ranges::find_if(caches_, [&](const auto& cache) { return cache->id_ == id; });
  if (found == caches_.end()) return nullptr;
  std::rotate(found, found + 1, caches_.end());
  return caches_.back();
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
  std::unique_ptr<CacheMemory> memory;
  const auto idle = std::ranges::find_if(
      caches_, [](const std::shared_ptr<KvCache>& cache) { return cache.use_count() == 1; });
  if (caches_.size() < kMost || idle == caches_.end()) {
    memory = make_();
  } else {
    // Reuses the memory of the least recently used idle cache as it is: the rows of a cache that
    // are not yet written may hold any numbers.
    memory = std::move((*idle)->memory_);
    caches_.erase(idle);
  }
  caches_.push_back(std::make_shared<KvCache>(random_(), std::move(memory)));
  return caches_.back();
}

std::shared_ptr<KvCache> KvCaches::make(std::int64_t room) {
  std::shared_ptr<KvCache> cache = make();
  cache->memory().reserve(room);
  return cache;
}

std::vector<std::shared_ptr<KvCache>> KvCaches::hold(std::span<const Tensor> tensors) {
  const std::lock_guard lock(mutex_);
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
  const std::lock_guard lock(mutex_);
  std::shared_ptr<KvCache> cache;
  if (past == 0) {
    cache = find_newest(pasts.first(1));
    if (cache == nullptr) cache = find_newest(presents.first(1));
    if (cache == nullptr) cache = make(room);
    cache->memory().reserve(room);
  } else if (const std::optional<Ticket> ticket = ticket_of(pasts); !ticket) {
    for (std::size_t part = 0; part < pasts.size(); ++part) check(pasts[part], part / 2, past);
    cache = make(room);
    upload(*cache, pasts, 0, past, past);
  } else {
    cache = find(ticket->cache);
    if (cache == nullptr) {
      fail("the past stands for a KV cache that is gone: a session keeps those of the ", kMost,
           " conversations that were used last; begin this one anew with all its tokens");
    }
    const std::int64_t held = std::min<std::int64_t>(ticket->length, past);
    if (ticket->version != cache->version_) {
      const std::int64_t untouched = cache->untouched_since(ticket->version, false);
      if (untouched < held) {
        fail("the past of ", past, " tokens was overwritten from token ", untouched,
             " on by a run that went back to there and on from there: pass that run's present");
      }
      const std::shared_ptr<KvCache> from = cache;
      cache = make(room);
      cache->memory().copy(from->memory(), held);
    }
    cache->memory().reserve(room);
    if (held < past) upload(*cache, pasts, held, past, past);
  }
  while (!cache->writes_.empty() && cache->writes_.back().first >= past) cache->writes_.pop_back();
  cache->writes_.push_back({++cache->version_, past});
  return cache;
}

void KvCaches::finish(KvCache& cache, std::span<const Tensor> presents, std::int64_t total) {
  const std::lock_guard lock(mutex_);
  cache.finished_ = cache.version_;
  Ticket ticket{
      .cache = cache.id_, .version = cache.version_, .length = static_cast<std::uint32_t>(total)};
  static_assert(sizeof ticket == kTicketBytes);
  for (std::size_t part = 0; part < presents.size(); ++part) {
    ticket.part = static_cast<std::uint32_t>(part);
    std::memcpy(presents[part].data, &ticket, sizeof ticket);
  }
}

bool KvCaches::has_ticket(const Tensor& tensor) { return Ticket::read(tensor).has_value(); }

bool KvCaches::restore(const Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  const std::optional<Ticket> ticket = Ticket::read(tensor);
  if (!ticket) return false;
  const std::shared_ptr<KvCache> cache = find(ticket->cache);
  if (cache == nullptr) return false;
  const std::int64_t length = ticket->length;
  if (cache->untouched_since(ticket->version, true) < length) {
    fail("the past of ", length, " tokens was overwritten from token ",
         cache->untouched_since(ticket->version, true),
         " on by a run that went back to there and on from there: pass that run's present");
  }
  // A failed run may have overwritten the positions that it had to compute; its repetition writes
  // them again.
  const std::int64_t held = std::min(length, cache->untouched_since(ticket->version, false));
  const std::size_t part = ticket->part;
  cache->memory().fetch(part, held);
  for_rows(tensor, part, 0, held, length, [&](const CacheRows& rows, std::byte* at) {
    cache->memory().read(rows, at, tensor.type);
  });
  return true;
}

std::size_t KvCaches::count() const {
  const std::lock_guard lock(mutex_);
  return caches_.size();
}

void CachesOfSteps::add(const std::shared_ptr<KvCaches>& caches) {
  const std::lock_guard lock(mutex_);
  caches_.push_back(caches);
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
