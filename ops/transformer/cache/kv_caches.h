// SPDX-License-Identifier: Apache-2.0
// The KV caches of a session whose devices keep them in their own memory.
//
// A conversation's keys and values stay in that memory (cache_memory.h). The graph's past and
// present tensors refer to it: in the place of their first row they hold a *ticket*, which says
// which cache it is, and which state it was in when the run that wrote the ticket ended. So callers
// may copy, rewind and branch as they do with tensors that hold the keys and values themselves:
//
//   a past that is the latest        the run continues in place, at any position up to its length
//   a past that others continued     a branch: what it held is copied to a new cache
//   a past without a ticket          its keys and values are uploaded to a new cache
//   no past                          a new cache, or that of the tensors' ticket if there is one
//
// Positions that were never written to the cache (for a token that a caller sampled, but did not
// run) are read from the tensor, as any other device would do. Present tensors hold nothing but the
// ticket.
//
// Two devices may share a session's conversations (share()), or a device and the host, which reads
// and appends to the tensors themselves (lend(), take_back()). A cache then knows how many leading
// positions each memory, and the tensors, hold of its newest state; a run copies the positions that
// its device lacks, and no others; from another device's memory, in layers with a window, those
// that the window shows. After a run of the host the tensors hold everything but the bytes under
// the ticket, which the cache keeps.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <vector>

#include "ops/dispatch_observer.h"
#include "ops/nodes/tensor.h"
#include "ops/transformer/cache/memory.h"
#include "ops/transformer/decoder.h"

namespace flownpu::transformer {

// How many of `total` tokens a window-sized cache tensor of `capacity` rows holds: L(T) in the
// documentation of com.microsoft.GroupQueryAttention.
std::int64_t resident(std::int64_t total, std::int64_t capacity, std::int64_t window);

// The view [1, G, P, d] of sequence `row` of a past or present [B, G, P, d].
Tensor sequence_of(const Tensor& cache, std::int64_t row);

// The size of a ticket in bytes, which a row of a key or value must have at least.
inline constexpr std::int64_t kTicketBytes = 32;

class KvCache {
 public:
  explicit KvCache(std::uint64_t id) : id_(id) {}
  ~KvCache() = default;
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;

  // That of the device for which the last run began.
  CacheMemory& memory() { return *held_[running_].memory; }

 private:
  friend class KvCaches;

  // The positions first .. end - 1.
  struct Positions {
    std::int64_t first = 0;
    std::int64_t end = 0;
  };

  // A device's memory, null until the device's first run; how many leading positions of the newest
  // state it holds; and which of these, in rising order, are not in its layers with a window. The
  // device that computed them has these.
  struct Held {
    std::unique_ptr<CacheMemory> memory;
    std::int64_t rows = 0;
    std::vector<Positions> gaps;

    // The gaps' part in first .. end - 1.
    std::vector<Positions> gaps_in(std::int64_t first, std::int64_t end) const;
  };

  // The run `version` wrote the positions from `first` on.
  struct Write {
    std::uint64_t version;
    std::int64_t first;
  };

  // The first position that a run after `version` wrote; the largest integer if none did.
  // `finished`: whether to count only runs that succeeded.
  std::int64_t untouched_since(std::uint64_t version, bool finished) const;

  // How many leading positions of the state of a ticket of this version are in a device's memory.
  std::int64_t rows_of(std::size_t device, std::uint64_t version) const;
  // Notes that a run which is the newest writes the positions from `first` on.
  void write_from(std::int64_t first);

  std::uint64_t id_;
  std::vector<Held> held_;  // by device
  std::size_t running_ = 0;
  // The tensors that the host wrote last: the address of the first one, how many leading positions
  // of the newest state they hold, and for each tensor the bytes under its ticket and the position
  // that these are of.
  struct Covered {
    std::array<std::byte, kTicketBytes> bytes;
    std::int64_t position = 0;
  };
  const void* tensors_ = nullptr;
  std::int64_t tensor_rows_ = 0;
  std::vector<Covered> covered_;
  // The versions of the last run and of the last run that succeeded; runs are counted from 1.
  std::uint64_t version_ = 0;
  std::uint64_t finished_ = 0;
  // Both members increase along the list: a write removes earlier writes that began at the same
  // position or later.
  std::vector<Write> writes_;
};

class KvCaches {
 public:
  // How many caches are kept; those of ongoing and of abandoned conversations cannot be told apart.
  // There are more only while runs hold all of them. A cache of 32768 positions of a 1B model is
  // 0.9 GB.
  static constexpr std::size_t kMost = 4;

  using Maker = std::function<std::unique_ptr<CacheMemory>()>;

  KvCaches(const Decoder& decoder, const Maker& make);

  // Makes these the same conversations as another device's. No run may have begun. Runs of the two
  // must follow one another.
  void share(const KvCaches& other);

  // The caches that the tensors' tickets refer to (null for one that is gone). While a caller holds
  // them, they are not reused for other conversations.
  std::vector<std::shared_ptr<KvCache>> hold(std::span<const Tensor> tensors);
  // Returns the cache for a run that writes the positions from `past` on. It holds positions 0 ..
  // past - 1 of what `pasts` stand for, and has room for `room` positions in all. `pasts`,
  // `presents`: key and value of each layer, [1, G, P, d]. Throws Error if the keys and values are
  // no longer available, and whatever CacheMemory throws.
  std::shared_ptr<KvCache> begin(std::span<const Tensor> pasts, std::span<const Tensor> presents,
                                 std::int64_t past, std::int64_t room);
  // To be called when the run has succeeded, with positions 0 .. total - 1 in the cache; writes the
  // tickets to `presents`.
  void finish(KvCache& cache, std::span<const Tensor> presents, std::int64_t total);

  // For a run of the host over `pasts` that writes the positions from `past` on: writes what they
  // stand for, up to there, into them, and takes the tickets out. Returns the cache that the run
  // goes on from, to be passed to take_back(); null if it begins another. Throws Error if the keys
  // and values are no longer available.
  std::shared_ptr<KvCache> lend(std::span<const Tensor> pasts, std::int64_t past);
  // To be called when the host's run has succeeded; writes tickets to `presents`, which hold
  // positions 0 .. total - 1.
  void take_back(std::shared_ptr<KvCache> cache, std::span<const Tensor> presents,
                 std::int64_t past, std::int64_t total);

  // Writes the keys or values for which the ticket of a tensor of one sequence stands into the
  // tensor. Returns false if the tensor has no ticket of one of these caches. Throws Error if they
  // were overwritten since.
  bool restore(const Tensor& tensor);

  // Whether a tensor holds a ticket, even one of another KvCaches.
  static bool has_ticket(const Tensor& tensor);

  std::size_t count() const;

 private:
  static constexpr std::uint64_t kMagic = 0x5456'4b55'504e'4c46;  // "FLNPUKVT"

  // The contents of a tensor's first row.
  struct Ticket {
    std::uint64_t magic = kMagic;
    std::uint64_t cache = 0;
    std::uint64_t version = 0;
    std::uint32_t length = 0;
    std::uint32_t part : 31 = 0;  // 2 x layer, + 1 for values
    // Whether the tensor itself holds all `length` positions.
    std::uint32_t in_tensor : 1 = 0;

    static std::optional<Ticket> read(const Tensor& tensor);
  };
  static_assert(sizeof(Ticket) == kTicketBytes);

  // The parts that devices have in common if they share their conversations.
  struct Shared {
    std::mutex mutex;
    std::mt19937_64 random{std::random_device{}()};
    std::vector<Maker> makers;  // by device
    // The most recently used cache is last.
    std::vector<std::shared_ptr<KvCache>> caches;
  };

  std::optional<Ticket> ticket_of(std::span<const Tensor> pasts) const;
  std::shared_ptr<KvCache> find(std::uint64_t id);
  std::shared_ptr<KvCache> find_newest(std::span<const Tensor> tensors);
  std::shared_ptr<KvCache> make();
  std::shared_ptr<KvCache> continued(const Ticket& ticket, std::span<const Tensor> pasts,
                                     std::int64_t past, std::int64_t room);
  void reserve(KvCache& cache, std::int64_t room) const;
  void check(const Tensor& past, std::size_t layer, std::int64_t total) const;
  void upload(KvCache& cache, std::span<const Tensor> pasts, std::int64_t from, std::int64_t to,
              std::int64_t past) const;
  void take_over(KvCache& cache, KvCache& source, const Ticket& ticket, DataType type,
                 std::int64_t has, std::int64_t held, std::int64_t seen) const;
  void move(KvCache& cache, KvCache& source, std::size_t device, DataType type,
            std::span<const KvCache::Positions> all,
            std::span<const KvCache::Positions> of_windows) const;
  void write_out(KvCache& cache, const Ticket& ticket, std::size_t device,
                 std::span<const Tensor> pasts, std::int64_t past, std::int64_t known,
                 HandOver& observed) const;
  static void write_ticket(Ticket ticket, std::size_t part, const Tensor& tensor);
  void download(KvCache& cache, std::size_t device, const Tensor& tensor, std::size_t part,
                std::int64_t from, std::int64_t to, std::int64_t total) const;
  void uncover(const KvCache& cache, std::uint64_t version, std::size_t part, const Tensor& tensor,
               std::int64_t total) const;
  std::size_t holder(const KvCache& cache, const Ticket& ticket, std::int64_t rows) const;
  std::int64_t first_seen(std::int64_t past) const;
  std::size_t bytes_of(const CacheRows& rows, DataType type) const;
  std::int64_t first_row(const Tensor& tensor, std::size_t layer, std::int64_t total) const;
  void for_rows(const Tensor& tensor, std::size_t part, std::int64_t from, std::int64_t to,
                std::int64_t total,
                const std::function<void(const CacheRows&, std::byte*)>& move) const;

  Decoder decoder_;
  std::shared_ptr<Shared> shared_;
  std::size_t device_ = 0;  // of shared_
};

// The caches of all steps that a device prepared, held weakly: they are freed with their step.
class CachesOfSteps {
 public:
  void add(const std::shared_ptr<KvCaches>& caches);
  // Those that were added last; null if there are none.
  std::shared_ptr<KvCaches> newest();
  // Implements Device::restore, for tensors of any number of sequences. Throws Error for a ticket
  // whose cache is gone.
  void restore(std::span<const Tensor> tensors);

 private:
  std::mutex mutex_;
  std::vector<std::weak_ptr<KvCaches>> caches_;
};

}  // namespace flownpu::transformer
