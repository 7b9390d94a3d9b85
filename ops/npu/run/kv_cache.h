// SPDX-License-Identifier: Apache-2.0
// The KV caches of a session on the array.
//
// A conversation's keys and values, bf16, stay in a buffer laid out as the programs have it. The
// tensors of the graph, past and present, stand for it: at the place of position 0 they hold a
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
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <vector>

#include "ops/nodes/tensor.h"
#include "ops/npu/artifacts/program_record.h"
#include "ops/npu/driver/runtime.h"
#include "ops/npu/nodes/decoder_shape.h"

namespace flownpu::npu {

// Tokens that a tensor of `capacity` rows, made for a window, holds of `total`: L(T) of the
// documentation of com.microsoft.GroupQueryAttention.
std::int64_t resident(std::int64_t total, std::int64_t capacity, std::int64_t window);

// A row of a tensor of keys or values, of `count` elements, into the bf16 of the array's buffer.
void read_row(const std::byte* from, DataType type, std::byte* to, std::int64_t count);

class KvCache {
 public:
  KvCache(std::uint64_t id, std::unique_ptr<Buffer> buffer) : id_(id), buffer_(std::move(buffer)) {}

  Buffer& buffer() { return *buffer_; }

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
  std::unique_ptr<Buffer> buffer_;
  // Runs so far, and the last that ended well.
  std::uint64_t version_ = 0;
  std::uint64_t finished_ = 0;
  // Both members rise: of two writes an earlier one that began later counts no more.
  std::vector<Write> writes_;
};

class KvCaches {
 public:
  // Caches that are kept, of conversations under way or given up, which cannot be told apart. One
  // of 32768 positions of a 1B model is 0.9 GB.
  static constexpr std::size_t kMost = 4;

  // `context`: positions of a layer. The runtime must outlive the caches. Throws Error if the
  // layout has no place for that many positions of such a decoder.
  KvCaches(Runtime& runtime, const DecoderShape& shape, std::int64_t context,
           const CacheLayout& layout, std::size_t bytes);

  // The cache that holds positions 0 .. past - 1 of what `pasts` stand for, for a run that writes
  // those from `past` on. `pasts`, `presents`: key and value of each layer, [1, G, P, d]. Throws
  // Error if the keys and values are not to be had any more, and DeviceError (kMemory).
  std::shared_ptr<KvCache> begin(std::span<const Tensor> pasts, std::span<const Tensor> presents,
                                 std::int64_t past);
  // The run ended well, with positions 0 .. total - 1; writes the tickets.
  void finish(KvCache& cache, std::span<const Tensor> presents, std::int64_t total);

  // Puts keys or values in the place of the ticket of a tensor. False if it has none of these
  // caches. Throws Error if they were overwritten.
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
  std::shared_ptr<KvCache> branch(KvCache& from, std::int64_t positions);
  void check(const Tensor& past, std::size_t layer, std::int64_t total) const;
  void upload(KvCache& cache, std::span<const Tensor> pasts, std::int64_t from, std::int64_t to,
              std::int64_t past) const;
  std::size_t offset(std::size_t layer, std::int64_t position) const;
  std::int64_t first_row(const Tensor& tensor, std::size_t layer, std::int64_t total) const;
  template <typename Move>
  void for_rows(KvCache& cache, const Tensor& tensor, std::size_t part, std::int64_t from,
                std::int64_t to, std::int64_t total, const Move& move) const;

  Runtime& runtime_;
  DecoderShape shape_;
  CacheLayout layout_;
  std::size_t bytes_;
  mutable std::mutex mutex_;
  std::mt19937_64 random_;
  // The most recently used last.
  std::vector<std::shared_ptr<KvCache>> caches_;
};

}  // namespace flownpu::npu
