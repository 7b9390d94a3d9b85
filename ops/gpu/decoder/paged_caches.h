// SPDX-License-Identifier: Apache-2.0
// The paged KV cache of a decoder in a device's memory, for models that ORT GenAI's engine runs
// (ops/definitions/paged_attention.py). The engine gives each sequence pages ("blocks") of S rows
// of tensors [P, S, G, d], which it neither reads nor writes itself. Their rows are in a
// DeviceCacheMemory of P S positions; the host's tensors, which are inputs and outputs of a run in
// the same memory, hold only a *ticket* in the place of their first bytes. Tensors without one are
// new to the device: it then takes from them the pages that sequences have filled before the run.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <vector>

#include "ops/cpu/attention/paged_call.h"
#include "ops/gpu/decoder/cache_memory.h"
#include "ops/gpu/decoder/forward_pass.h"
#include "ops/transformer/cache/kv_caches.h"

namespace flownpu::gpu {

class PagedCaches {
 public:
  PagedCaches(std::shared_ptr<Context> context, const transformer::Decoder& decoder, DataType type);

  // Throws Error for inputs that PagedAttention refuses; Unsupported for a sequence without tokens,
  // for none, and for more than `most`.
  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs, std::int64_t most) const;
  // Tokens [first, first + tokens) of the hidden states are those of a sequence.
  std::vector<cpu::PagedSequence> sequences(std::span<const Tensor> inputs) const;

  // For a run: has the keys and values of all sequences in memory(), room for their new tokens, and
  // their pages. Throws GpuError; Error if the keys and values are no longer there; Unsupported for
  // caches that do not fit the device, or whose outputs are not their inputs. Callers hold the
  // context's mutex, here and below.
  void begin(std::span<const Tensor> inputs, std::span<const Tensor> outputs);
  DeviceCacheMemory& memory() { return cache_->memory; }
  const Pages& pages() const { return pages_; }

  // Puts the keys or values for which a tensor's ticket stands into the tensor; does nothing if it
  // has no ticket of this cache.
  void restore(const Tensor& tensor);

 private:
  struct Ticket {
    std::uint64_t magic = 0x4750'4b55'504e'4c46;  // "FLNPUKPG"
    std::uint64_t cache = 0;
    std::uint64_t part = 0;  // 2 x layer, + 1 for values
    std::uint64_t unused = 0;

    static std::optional<Ticket> read(const Tensor& tensor);
  };
  static_assert(sizeof(Ticket) == transformer::kTicketBytes);

  struct Cache {
    std::uint64_t id;
    Shape shape;  // of each tensor
    DeviceCacheMemory memory;
    std::vector<bool> pages;                                     // of which rows are in the memory
    std::vector<std::array<std::byte, sizeof(Ticket)>> covered;  // by the tickets
  };

  std::array<Tensor, kPagedSinCache + 1> inputs_of_attention(std::span<const Tensor> inputs) const;
  std::span<const Tensor> pasts_of(std::span<const Tensor> inputs) const;
  bool is_known(const Tensor& first) const;
  void make(std::span<const Tensor> pasts);
  void write_pages(std::span<const Tensor> inputs);
  // Takes a page's rows of all parts from the tensors, but for what the tickets cover.
  void take(std::span<const Tensor> pasts, std::int64_t page);
  // The rows of a head in a page, as the tensor of a part stands for them.
  std::vector<std::byte> gathered(const Tensor& tensor, std::size_t part, std::int64_t page,
                                  std::int64_t head) const;
  std::size_t row_bytes() const;

  std::shared_ptr<Context> context_;
  transformer::Decoder decoder_;
  DataType type_;
  cpu::AttentionAttributes attributes_;
  std::unique_ptr<Cache> cache_;
  Pages pages_;
  std::mt19937_64 random_{std::random_device{}()};
};

}  // namespace flownpu::gpu
