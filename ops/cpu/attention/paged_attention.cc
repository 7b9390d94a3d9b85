// SPDX-License-Identifier: Apache-2.0
// PagedAttention on the CPU: FlowQKVAttention of the new tokens of several sequences in one call,
// whose keys and values lie in blocks (paged_call.h).
//
// The new keys and values are stored first. Then each task sweeps the keys of one KV head that a
// tile of one sequence's queries sees. Chunks of keys begin at multiples of kChunkKeys positions,
// and every tile goes through the same kernel: so a token's output depends on its own sequence
// alone. Its bits do not change with the split into calls or with the other sequences.
#include <algorithm>
#include <cstring>
#include <limits>

#include "ops/cpu/attention/paged_call.h"
#include "ops/cpu/attention/plan.h"
#include "ops/cpu/attention/tiles.h"
#include "ops/cpu/step.h"
#include "ops/error.h"
#include "ops/system/processors.h"

namespace flownpu::cpu {
namespace {

// A block of the kernel's scores, 128 x 64 f32, is 32 KB and stays in L1, as in plan.cc.
constexpr std::int64_t kChunkKeys = 128;
static_assert(kChunkKeys % kAttentionKeyStep == 0);

// The work of a task: tokens [first, first + tokens) of the call, of one sequence.
struct PagedTile {
  PagedSequence sequence;
  std::int64_t group;
  std::int64_t first;
  std::int64_t tokens;
  // The first token's position in its sequence.
  std::int64_t position;
};

class PagedAttention final : public Step {
 public:
  PagedAttention(const Node& node, const Context& context)
      : context_(context), attributes_(node), cache_bytes_(second_level_cache_bytes()) {
    check_paged_node(node, attributes_);
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    const PagedCall call(attributes_, inputs, {});
    check_paged_call(attributes_, call);
    outputs[kPagedOutput] = Shape{call.tokens(), attributes_.heads * attributes_.head_size};
    outputs[kKeyCacheOut] = inputs[kKeyCache].shape;
    outputs[kValueCacheOut] = inputs[kValueCache].shape;
  }

  std::size_t scratch_bytes(std::span<const Tensor> inputs) const override {
    const PagedCall call(attributes_, inputs, {});
    Scratch scratch;
    take(scratch, call);
    return scratch.bytes();
  }

  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> memory) const override {
    const PagedCall call(attributes_, inputs, outputs);
    Scratch scratch(memory.data());
    const Work work = take(scratch, call);
    keep(call.input(kKeyCache), outputs[kKeyCacheOut]);
    keep(call.input(kValueCache), outputs[kValueCacheOut]);
    context_.pool->run_rows(call.tokens(), [&](std::int64_t token) { store(call, token); });
    attend(call, work);
  }

  std::int64_t multiply_adds() const override { return attention_multiply_adds(attributes_); }

 private:
  struct Work {
    std::int64_t tile_tokens;
    // [sequences + 1]: for each sequence, how many tiles those before it have.
    std::int32_t* first_tile;
    // A TileMemory for each thread.
    std::byte* tiles;
    std::int64_t tile_bytes;
  };

  TileMemory tile_memory(Scratch& scratch, const PagedCall& call, std::int64_t tile_tokens) const {
    const std::int64_t rows = tile_tokens * attributes_.heads_per_group();
    const std::int64_t d = attributes_.head_size;
    return {scratch, rows, d,
            context_.kernels.attention_scratch(rows, d, call.cache_type(), kChunkKeys)};
  }

  Work take(Scratch& scratch, const PagedCall& call) const {
    const Kernels& kernels = context_.kernels;
    const std::int64_t d = attributes_.head_size;
    const AttentionShape shape{1,
                               attributes_.kv_heads,
                               attributes_.heads_per_group(),
                               d,
                               call.tokens(),
                               call.tokens(),
                               attributes_.window,
                               static_cast<std::int64_t>(size_of(call.cache_type()))};
    const AttentionMachine machine{context_.pool->threads(), cache_bytes_, kernels.few_rows,
                                   kernels.block_rows,
                                   kernels.attention_element(d, call.cache_type())};
    Work work{};
    work.tile_tokens = plan_attention(shape, machine).tile_tokens;
    Scratch one;
    tile_memory(one, call, work.tile_tokens);
    work.tile_bytes = static_cast<std::int64_t>(one.bytes());
    work.first_tile = scratch.take<std::int32_t>(call.sequences() + 1);
    work.tiles = scratch.take<std::byte>(context_.pool->threads() * work.tile_bytes);
    return work;
  }

  // An output cache in its input's memory keeps what it holds; any other gets a copy.
  static void keep(const Tensor& from, const Tensor& to) {
    if (from.data != to.data && from.bytes() > 0) std::memcpy(to.data, from.data, from.bytes());
  }

  void store(const PagedCall& call, std::int64_t token) const {
    const PagedSequence sequence = call.sequence_of(token);
    const std::int64_t position = sequence.past + token - sequence.first;
    const std::int64_t d = attributes_.head_size;
    const HeadPreparation keys = call.preparation(kPagedKNormWeight);
    for (std::int64_t group = 0; group < attributes_.kv_heads; ++group) {
      alignas(64) float key[kMaxHeadSize];
      std::copy_n(call.key(token, group), d, key);
      keys.prepare(context_.kernels, key, position);
      const std::int64_t offset = call.cache_offset(sequence, position, group);
      context_.kernels.store_cache(key, call.key_cache() + offset, call.cache_type(), d);
      context_.kernels.store_cache(call.value(token, group), call.value_cache() + offset,
                                   call.cache_type(), d);
    }
  }

  void attend(const PagedCall& call, const Work& work) const {
    std::int32_t tiles = 0;
    for (std::int64_t s = 0; s <= call.sequences(); ++s) {
      work.first_tile[s] = tiles;
      if (s == call.sequences()) break;
      const std::int64_t more = call.sequence(s).tokens + work.tile_tokens - 1;
      tiles += static_cast<std::int32_t>(more / work.tile_tokens);
    }
    // The last tasks run first: a scheduler puts prompts behind decoding sequences, and the last
    // tile of a prompt sees the most keys.
    const std::int64_t tasks = tiles * attributes_.kv_heads;
    run_in_order(*context_.pool, tasks, [&](std::int64_t task, std::size_t thread) {
      Scratch scratch(work.tiles + static_cast<std::int64_t>(thread) * work.tile_bytes);
      const TileMemory memory = tile_memory(scratch, call, work.tile_tokens);
      sweep(call, tile_of(call, work, tasks - 1 - task), memory);
    });
  }

  PagedTile tile_of(const PagedCall& call, const Work& work, std::int64_t task) const {
    const std::int64_t index = task / attributes_.kv_heads;
    std::int32_t* end = work.first_tile + call.sequences() + 1;
    // The last sequence whose first tile is at or before this one; sequences without tokens have no
    // tiles.
    const std::int64_t s = std::upper_bound(work.first_tile, end, index) - work.first_tile - 1;
    PagedTile tile{};
    tile.sequence = call.sequence(s);
    tile.group = task % attributes_.kv_heads;
    const std::int64_t before = (index - work.first_tile[s]) * work.tile_tokens;
    tile.first = tile.sequence.first + before;
    tile.tokens = std::min(work.tile_tokens, tile.sequence.tokens - before);
    tile.position = tile.sequence.past + before;
    return tile;
  }

  // Eq. 6-12 over the keys that the tile sees; rows are [tokens][H / G].
  void sweep(const PagedCall& call, const PagedTile& tile, const TileMemory& memory) const {
    const std::int64_t per_group = attributes_.heads_per_group();
    const std::int64_t d = attributes_.head_size;
    const std::int64_t window =
        attributes_.window > 0 ? attributes_.window : std::numeric_limits<std::int32_t>::max();
    const HeadPreparation queries = call.preparation(kPagedQNormWeight);
    for (std::int64_t t = 0; t < tile.tokens; ++t) {
      const std::int64_t position = tile.position + t;
      queries.prepare_queries(context_.kernels, call.query(tile.first + t, tile.group * per_group),
                              per_group, position, attributes_.scale,
                              memory.query + t * per_group * d);
      for (std::int64_t h = 0; h < per_group; ++h) {
        const std::int64_t r = t * per_group + h;
        memory.first_key[r] =
            static_cast<std::int32_t>(std::max<std::int64_t>(0, position + 1 - window));
        memory.last_key[r] = static_cast<std::int32_t>(position + 1);
        memory.numerator[r] = call.output(tile.first + t, tile.group * per_group + h);
      }
    }
    const CacheBlocks blocks = call.blocks(tile.sequence);
    const std::int64_t offset = call.head_offset(tile.group);
    AttentionSweep sweep;
    sweep.query = memory.query;
    sweep.rows = tile.tokens * per_group;
    sweep.head_size = d;
    sweep.key = call.key_cache() + offset;
    sweep.value = call.value_cache() + offset;
    sweep.row_bytes = call.row_bytes();
    sweep.blocks = &blocks;
    sweep.cache_type = call.cache_type();
    sweep.keys = tile.position + tile.tokens;
    sweep.begin = memory.first_key[0] / kChunkKeys * kChunkKeys;
    sweep.first_key = memory.first_key;
    sweep.last_key = memory.last_key;
    sweep.softcap = attributes_.softcap;
    sweep.chunk_keys = kChunkKeys;
    sweep.maximum = memory.maximum;
    sweep.denominator = memory.denominator;
    sweep.numerator = memory.numerator;
    sweep.scratch = memory.kernel;
    context_.kernels.attend_many(sweep);
    for (std::int64_t r = 0; r < sweep.rows; ++r)
      divide(memory.numerator[r], memory.denominator[r], d);
  }

  Context context_;
  AttentionAttributes attributes_;
  std::int64_t cache_bytes_;
};

}  // namespace

std::span<const Operator> paged_attention_operators() {
  static const Operator kOperators[] = {
      {kPagedAttention,
       [](const Node& node, const Context& context) -> std::unique_ptr<Step> {
         return std::make_unique<PagedAttention>(node, context);
       }},
  };
  return kOperators;
}

}  // namespace flownpu::cpu
