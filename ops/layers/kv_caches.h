// SPDX-License-Identifier: Apache-2.0
// The KV caches of a session whose device keeps them in memory of its own.
//
// A conversation's keys and values stay there (cache_memory.h). The tensors of the graph, past and
// present, stand for it: at the place of position 0 they hold a
// *ticket*, which says which cache it is and what it held when the run that wrote the ticket ended.
// So callers may copy, rewind and branch as they do with the keys and values themselves:
//
//   a past that is the latest        the run goes on in place, at any position up to its length
//   a past that others went on from  what it held is copied to a cache of its own, a branch
//   a past without a ticket          its keys and values are moved to a cache, once
//   no past                          a new cache; that of the tensors' ticket, if they have one
//
// Positions that the cache never got (a caller that samples a token and does not run it) are taken
// from the tensor, as any other device would. Present tensors hold nothing but the ticket.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <vector>

#include "ops/layers/cache_memory.h"
#include "ops/layers/decoder_sizes.h"
#include "ops/nodes/tensor.h"

namespace flownpu::layers {

// Tokens that a tensor of `capacity` rows, made for a window, holds of `total`: L(T) of the
// documentation of com.microsoft.GroupQueryAttention.
std::int64_t resident(std::int64_t total, std::int64_t capacity, std::int64_t window);

// One sequence of a past or present [B, G, P, d], as [1, G, P, d].
Tensor sequence_of(const Tensor& cache, std::int64_t row);

class KvCache {
 public:
  KvCache(std::uint64_t id, std::unique_ptr<CacheMemory> memory)
      : id_(id), memory_(std::move(memory)) {}

  CacheMemory& memory() { return *memory_; }

 private:
  friend class KvCaches;

  // A run wrote positions `first` and on.
  struct Write {
    std::uint64_t version;
    std::int64_t first;
  };

  // Positions from 0 on that no run after `version` wrote; `finished`: runs that ended well only.
  std::int64_t untouched_since(std::uint64_t version, bool finished) const;

  std::uint64_t id_;
  std::unique_ptr<CacheMemory> memory_;
  // Runs so far, and the last that ended well.
  std::uint64_t version_ = 0;
  std::uint64_t finished_ = 0;
  // Both members rise: of two writes an earlier one that began later counts no more.
  std::vector<Write> writes_;
};

class KvCaches {
 public:
  // Caches that are kept, of conversations under way or given up, which cannot be told apart, and
  // more while a run holds as many. One of 32768 positions of a 1B model is 0.9 GB.
  static constexpr std::size_t kMost = 4;
  // Bytes of a ticket: no row of a key or value may have fewer.
  static constexpr std::int64_t kTicketBytes = 32;

  using Maker = std::function<std::unique_ptr<CacheMemory>()>;

  KvCaches(const DecoderSizes& sizes, Maker make);

  // The caches that the tensors stand for: while they are held, none of them is given to another.
  std::vector<std::shared_ptr<KvCache>> hold(std::span<const Tensor> tensors);
  // The cache that holds positions 0 .. past - 1 of what `pasts` stand for, for a run that writes
  // those from `past` on, with room for `room` in all. `pasts`, `presents`: key and value of each
  // layer, [1, G, P, d]. Throws Error if the keys and values are not to be had any more, and what
  // CacheMemory throws.
  std::shared_ptr<KvCache> begin(std::span<const Tensor> pasts, std::span<const Tensor> presents,
                                 std::int64_t past, std::int64_t room);
  // The run ended well, with positions 0 .. total - 1; writes the tickets.
  void finish(KvCache& cache, std::span<const Tensor> presents, std::int64_t total);

  // Puts keys or values in the place of the ticket of a tensor of one sequence. False if it has
  // none of these caches. Throws Error if they were overwritten.
  bool restore(const Tensor& tensor);

  // Whether a tensor has a ticket, of whichever caches.
  static bool has_ticket(const Tensor& tensor);

  std::size_t count() const;

 private:
  struct Ticket;

  std::optional<Ticket> ticket_of(std::span<const Tensor> pasts) const;
  std::shared_ptr<KvCache> find(std::uint64_t id);
  std::shared_ptr<KvCache> find_newest(std::span<const Tensor> tensors);
  std::shared_ptr<KvCache> make();
  std::shared_ptr<KvCache> make(std::int64_t room);
  void check(const Tensor& past, std::size_t layer, std::int64_t total) const;
  void upload(KvCache& cache, std::span<const Tensor> pasts, std::int64_t from, std::int64_t to,
              std::int64_t past) const;
  std::int64_t first_row(const Tensor& tensor, std::size_t layer, std::int64_t total) const;
  template <typename Move>
  void for_rows(const Tensor& tensor, std::size_t part, std::int64_t from, std::int64_t to,
                std::int64_t total, const Move& move) const;

  DecoderSizes sizes_;
  Maker make_;
  mutable std::mutex mutex_;
  std::mt19937_64 random_;
  // The most recently used last.
  std::vector<std::shared_ptr<KvCache>> caches_;
};

// The caches of the steps that a device prepared; they go when their step does.
class CachesOfSteps {
 public:
  void add(const std::shared_ptr<KvCaches>& caches);
  // Device::restore of tensors of any number of sequences. Throws Error for one that stands for a
  // cache that is gone.
  void restore(std::span<const Tensor> tensors);

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<KvCaches>> caches_;
};

}  // namespace flownpu::layers
