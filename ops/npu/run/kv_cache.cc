// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/run/kv_cache.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <utility>

#include "ops/error.h"
#include "ops/formats/numbers.h"

namespace flownpu::npu {
namespace {

constexpr std::uint64_t kMagic = 0x5456'4b55'504e'4c46;  // "FLNPUKVT"

}  // namespace

void read_row(const std::byte* from, DataType type, std::byte* to, std::int64_t count) {
  if (type == DataType::kBFloat16) {
    std::memcpy(to, from, static_cast<std::size_t>(count) * kBFloat16Bytes);
    return;
  }
  for (std::int64_t i = 0; i < count; ++i, to += kBFloat16Bytes) {
    float value = 0;
    if (type == DataType::kFloat16) {
      std::uint16_t half = 0;
      std::memcpy(&half, from + i * sizeof half, sizeof half);
      value = from_half(half);
    } else {
      std::memcpy(&value, from + i * sizeof value, sizeof value);
    }
    const std::uint16_t bits = to_bfloat16(value);
    std::memcpy(to, &bits, sizeof bits);
  }
}

namespace {

// The other way round.
void write_row(const std::byte* from, DataType type, std::byte* to, std::int64_t count) {
  if (type == DataType::kBFloat16) {
    std::memcpy(to, from, static_cast<std::size_t>(count) * kBFloat16Bytes);
    return;
  }
  for (std::int64_t i = 0; i < count; ++i, from += kBFloat16Bytes) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, from, sizeof bits);
    const float value = from_bfloat16(bits);
    if (type == DataType::kFloat16) {
      const std::uint16_t half = to_half(value);
      std::memcpy(to + i * sizeof half, &half, sizeof half);
    } else {
      std::memcpy(to + i * sizeof value, &value, sizeof value);
    }
  }
}

bool may_hold(const Tensor& tensor, std::size_t bytes) {
  const DataType type = tensor.type;
  const bool floats =
      type == DataType::kBFloat16 || type == DataType::kFloat16 || type == DataType::kFloat32;
  return tensor.data != nullptr && floats && tensor.shape.rank() == 4 && tensor.bytes() >= bytes;
}

}  // namespace

std::int64_t resident(std::int64_t total, std::int64_t capacity, std::int64_t window) {
  if (total <= capacity) return total;
  const std::int64_t evicted_at_once = capacity - window + 1;
  return total - evicted_at_once * ((total - capacity + evicted_at_once - 1) / evicted_at_once);
}

// What a tensor holds at the place of position 0: 32 bytes of the 64 or more that a head of 32 or
// more elements has.
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
  for (const Write& write : writes_) {  // The first of those after has the smallest position.
    if (write.version > version && (!finished || write.version <= finished_)) return write.first;
  }
  return std::numeric_limits<std::int64_t>::max();
}

KvCaches::KvCaches(Runtime& runtime, const DecoderShape& shape, std::int64_t context,
                   const CacheLayout& layout, std::size_t bytes)
    : runtime_(runtime),
      shape_(shape),
      layout_(layout),
      bytes_(bytes),
      random_(std::random_device{}()) {
  const std::size_t vector = shape.angle_bytes();
  const auto heads = static_cast<std::size_t>(shape.kv_heads);
  if (layout.value < vector || layout.head < layout.value + vector ||
      layout.position / heads < layout.head ||
      layout.layer / layout.position < static_cast<std::size_t>(context) ||
      bytes / layout.layer < shape.layers.size()) {
    fail("expected a KV cache with room for ", shape.layers.size(), " layers of ", context,
         " positions of ", heads, " keys and values of ", vector, " bytes, got ", bytes, " bytes, ",
         layout.layer, " bytes a layer, ", layout.position, " a position, ", layout.head,
         " a head, values ", layout.value, " behind their keys");
  }
}

std::size_t KvCaches::offset(std::size_t layer, std::int64_t position) const {
  return layer * layout_.layer + static_cast<std::size_t>(position) * layout_.position;
}

// The position that row 0 of a tensor holds when there are `total`.
std::int64_t KvCaches::first_row(const Tensor& tensor, std::size_t layer,
                                 std::int64_t total) const {
  const LayerKind& kind = shape_.layers[layer];
  if (!kind.window_sized_cache) return 0;
  return total - resident(total, tensor.shape[2], kind.window);
}

// Calls move(row of the tensor, row of the buffer) for each head of positions from .. to - 1 that
// the tensor has room for; `part`: as in a ticket; `total`: tokens that the tensor stands for.
template <typename Move>
void KvCaches::for_rows(KvCache& cache, const Tensor& tensor, std::size_t part, std::int64_t from,
                        std::int64_t to, std::int64_t total, const Move& move) const {
  const std::int64_t capacity = tensor.shape[2];
  const std::int64_t base = first_row(tensor, part / 2, total);
  const std::size_t row_bytes = static_cast<std::size_t>(shape_.head_size) * size_of(tensor.type);
  for (std::int64_t position = std::max(from, base); position < std::min(to, base + capacity);
       ++position) {
    std::byte* line = cache.buffer().bytes().data() + offset(part / 2, position);
    for (std::int64_t group = 0; group < shape_.kv_heads; ++group) {
      const auto row = static_cast<std::size_t>(group * capacity + position - base);
      move(tensor.as<std::byte>() + row * row_bytes,
           line + static_cast<std::size_t>(group) * layout_.head + part % 2 * layout_.value);
    }
  }
}

void KvCaches::check(const Tensor& past, std::size_t layer, std::int64_t total) const {
  const LayerKind& kind = shape_.layers[layer];
  if (kind.window_sized_cache || past.shape[2] >= total) return;
  fail("expected a past of at least ", total, " positions in layer ", layer, ", got ",
       past.shape[2]);
}

void KvCaches::upload(KvCache& cache, std::span<const Tensor> pasts, std::int64_t from,
                      std::int64_t to, std::int64_t past) const {
  for (std::size_t part = 0; part < pasts.size(); ++part) {
    check(pasts[part], part / 2, past);
    for_rows(cache, pasts[part], part, from, to, past, [&](std::byte* row, std::byte* vector) {
      read_row(row, pasts[part].type, vector, shape_.head_size);
    });
  }
  const auto bytes = static_cast<std::size_t>(to - from) * layout_.position;
  for (std::size_t layer = 0; layer < shape_.layers.size(); ++layer)
    cache.buffer().to_device(offset(layer, from), bytes);
}

// The ticket that all of a run's pasts have; nothing if none has one.
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

// The cache whose latest ticket a tensor has, or null.
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
  std::unique_ptr<Buffer> buffer;
  if (caches_.size() < kMost) {
    buffer = runtime_.allocate(bytes_);
    buffer->to_device(0, bytes_);  // Numbers, which what the array has there may not be.
  } else {
    // What the least recently used one holds are numbers, which is all that a cache must.
    buffer = std::move(caches_.front()->buffer_);
    caches_.erase(caches_.begin());
  }
  caches_.push_back(std::make_shared<KvCache>(random_(), std::move(buffer)));
  return caches_.back();
}

std::shared_ptr<KvCache> KvCaches::branch(KvCache& from, std::int64_t positions) {
  std::shared_ptr<KvCache> cache = make();
  const auto bytes = static_cast<std::size_t>(positions) * layout_.position;
  for (std::size_t layer = 0; layer < shape_.layers.size(); ++layer) {
    const std::size_t begin = offset(layer, 0);
    from.buffer().to_host(begin, bytes);
    std::memcpy(cache->buffer().bytes().data() + begin, from.buffer().bytes().data() + begin,
                bytes);
    cache->buffer().to_device(begin, bytes);
  }
  return cache;
}

std::shared_ptr<KvCache> KvCaches::begin(std::span<const Tensor> pasts,
                                         std::span<const Tensor> presents, std::int64_t past) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<KvCache> cache;
  if (past == 0) {
    cache = find_newest(pasts.first(1));
    if (cache == nullptr) cache = find_newest(presents.first(1));
    if (cache == nullptr) cache = make();
  } else if (const std::optional<Ticket> ticket = ticket_of(pasts); !ticket) {
    for (std::size_t part = 0; part < pasts.size(); ++part) check(pasts[part], part / 2, past);
    cache = make();
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
      cache = branch(*cache, held);
    }
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
  static_assert(sizeof ticket == 32);
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
  // A run that failed has written the positions that it was to compute, and will again.
  const std::int64_t held = std::min(length, cache->untouched_since(ticket->version, false));
  const std::size_t part = ticket->part;
  cache->buffer().to_host(offset(part / 2, 0), static_cast<std::size_t>(held) * layout_.position);
  for_rows(*cache, tensor, part, 0, held, length, [&](std::byte* row, const std::byte* vector) {
    write_row(vector, tensor.type, row, shape_.head_size);
  });
  return true;
}

std::size_t KvCaches::count() const {
  const std::lock_guard lock(mutex_);
  return caches_.size();
}

}  // namespace flownpu::npu
