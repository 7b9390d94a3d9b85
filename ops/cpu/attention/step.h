// SPDX-License-Identifier: Apache-2.0
// The common base of FlowQKVAttention and FlowKVAttention on the CPU.
//
// A step has three parts. It appends keys and values to the cache (cache.cc). It attends tile by
// tile (flow_qkv_attention.cc), and merges the parts of the keys if there are several
// (flow_kv_attention.cc). If a window-sized cache evicted several tokens at once, it moves the
// remaining rows to the front (cache.cc). step.cc has attributes and shapes, checks.cc what is
// refused, plan.h how the work is cut into tasks, and blocks.cc tokens that see one another in both
// directions.
#pragma once

#include <cstdint>
#include <string>

#include "ops/cpu/attention/heads.h"
#include "ops/cpu/attention/plan.h"
#include "ops/cpu/attention/tiles.h"
#include "ops/cpu/step.h"
#include "ops/nodes/flow_qkv_attention.h"

namespace flownpu::cpu {

// One row of the batch in one call.
struct AttentionRow {
  // Tokens before this call, and tokens of this call without the padding on the right.
  std::int64_t past;
  std::int64_t tokens;
  // The position that row 0 of the cache holds before, and after, this call; always 0 unless the
  // cache is window-sized.
  std::int64_t base_before;
  std::int64_t base_after;
  // For each token, one past the last token of this call that it sees; null without bidirectional
  // blocks.
  const std::int32_t* seen_tokens;
};

// Where the state (m, l, Y) of one query over one part of the keys lies; the numerator is f32
// [head_size].
struct PartState {
  float* maximum;
  float* denominator;
  float* numerator;
};

// KV rows of one (batch, group): K and V, each [capacity] rows of the cache's type.
struct KeyValueRows {
  std::byte* key;
  std::byte* value;
  // Position that row 0 holds.
  std::int64_t base;
};

// The destination of one KV head's past, which must be there before tokens are appended.
struct PastMove {
  KeyValueRows to;
  const std::byte* key;
  const std::byte* value;
  std::size_t bytes;
  bool needed() const { return bytes > 0 && (key != to.key || value != to.value); }
};

// Positions [begin, end) of keys.
struct KeyRange {
  std::int64_t begin;
  std::int64_t end;
};

// The views and numbers of one call.
struct AttentionCall {
  // Takes batch and tokens from the query's shape, which need not have been checked.
  AttentionCall(std::span<const Tensor> inputs, std::span<const Tensor> outputs);

  std::span<const Tensor> inputs;
  std::span<const Tensor> outputs;
  std::int64_t batch = 0;
  // S, the tokens of this call, or of the slice if a long prompt is computed slice by slice; the
  // slice's first token; and the prompt's S.
  std::int64_t tokens = 0;
  std::int64_t first_token = 0;
  std::int64_t prompt_tokens = 0;
  // T: the batch's largest number of tokens so far, this call's included.
  std::int64_t total = 0;
  std::int64_t past_capacity = 0;
  std::int64_t capacity = 0;
  DataType cache_type = DataType::kFloat32;
  // Bytes of a row of K or V in the cache: d elements, and the scale of int8 ones.
  std::int64_t row_bytes = 0;
  AttentionPlan plan = {};
  // The most parts that a later step's plan can have as the cache fills. Memory is taken for this
  // number, so that a later decode step needs no more.
  std::int64_t most_parts = 0;
  // A TileMemory for each thread, `tile_bytes` apart.
  std::byte* tiles = nullptr;
  std::int64_t tile_bytes = 0;
  // With several parts, the states that are to be merged: see FlowQKVAttention::part_state.
  float* states = nullptr;
  // For each tile of queries, the parts that are not done yet.
  std::int32_t* parts_left = nullptr;
  // This call's K and V if the present cannot hold them all at once: [B][G][staged_rows] rows each.
  std::byte* staged_key = nullptr;
  std::byte* staged_value = nullptr;
  std::int64_t staged_rows = 0;
  // AttentionRow::seen_tokens of all rows, [batch][tokens], where there are bidirectional blocks.
  std::int32_t* seen_tokens = nullptr;

  // An input that the node does not list is absent.
  const Tensor& input(AttentionInput index) const;
  // GroupQueryAttention's rule: a call that brings all tokens so far is a first prompt, whose
  // shorter rows are padded on the right; in any other call every row brings S tokens.
  bool is_first_prompt() const { return prompt_tokens == total; }
  bool staged() const { return staged_key != nullptr; }
  // Whether the past holds the keys and values of all tokens, because another layer's attention has
  // appended them: this call brings none.
  bool has_no_keys() const {
    return tokens > 0 && input(kKey).present() && input(kKey).shape.rank() == 3 &&
           input(kKey).shape[1] == 0;
  }
};

// Throws Error if an input of the node is given without the inputs that it needs.
void check_inputs(const Node& node, const AttentionAttributes& attributes);

class FlowQKVAttention : public Step {
 public:
  FlowQKVAttention(const Node& node, const Context& context);

  // past_key, unless there is a single KV head. The filled rows of a single head may end long
  // before the buffer does, and threads would then prefetch parts that they do not begin with.
  std::optional<std::size_t> streamed_input() const override {
    if (attributes_.kv_heads == 1) return std::nullopt;
    return kPastKey;
  }

  // Query, key, value and, unless counted_prompt, position_ids are sliced. Attention must be
  // causal, and both presents must be outputs, because they hold the keys and values of earlier
  // slices.
  std::optional<Slicing> slicing(const Node& node) const override;
  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override;
  std::size_t scratch_bytes(std::span<const Tensor> inputs) const override;
  void run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
           std::span<std::byte> scratch) const override;
  // Per token: see attention_multiply_adds.
  std::int64_t multiply_adds() const override;

 protected:
  const AttentionAttributes& attributes() const { return attributes_; }

  // flow_qkv_attention.cc: computes the outputs of a call whose keys and values are in their cache.
  virtual void attend(const AttentionCall& call) const;
  // A row of the batch in this call.
  AttentionRow row_of(const AttentionCall& call, std::int64_t batch) const;
  // Where the keys and values of one KV head are.
  KeyValueRows cache_rows(const AttentionCall& call, std::int64_t batch, std::int64_t group) const;
  // A token's queries of one group, normed, rotated and scaled: out[H / G][d].
  void prepare_queries(const AttentionCall& call, std::int64_t batch, std::int64_t group,
                       std::int64_t token, float* out) const;
  // Where a head's output goes.
  float* output_row(const AttentionCall& call, std::int64_t batch, std::int64_t token,
                    std::int64_t head) const;

 private:
  struct Tile;

  // step.cc: describes a call whose inputs' shapes were checked.
  AttentionCall describe(std::span<const Tensor> inputs, std::span<const Tensor> outputs) const;
  void plan(AttentionCall& call) const;
  void take(Scratch& scratch, AttentionCall& call) const;

  // checks.cc: first shapes, then the values of lengths and positions.
  void check_shapes(std::span<const Tensor> inputs) const;
  void check_without_keys(const AttentionCall& call) const;
  void check_lengths(const AttentionCall& call) const;
  void check_positions(const AttentionCall& call, std::int64_t batch,
                       const AttentionRow& row) const;

  // blocks.cc: tokens that see one another in both directions.
  void check_block_numbers(const AttentionCall& call) const;
  void take_seen_tokens(Scratch& scratch, AttentionCall& call) const;
  void find_seen_tokens(AttentionCall& call) const;

  // cache.cc: the KV cache, and what queries and keys go through before they meet.
  void take_staged(Scratch& scratch, AttentionCall& call) const;
  // L(T) of the GroupQueryAttention documentation: how many tokens a window-sized cache holds after
  // T tokens.
  std::int64_t resident(std::int64_t total, std::int64_t capacity) const;
  // The tokens of the whole prompt, not only of this slice, in a row of the batch.
  AttentionRow prompt_row_of(const AttentionCall& call, std::int64_t batch) const;
  PastMove past_move(const AttentionCall& call, std::int64_t batch, std::int64_t group) const;
  void append(const AttentionCall& call) const;
  void keep_past(const AttentionCall& call) const;
  void append_token(const AttentionCall& call, std::int64_t batch, std::int64_t token) const;
  void compact(const AttentionCall& call, std::int64_t batch, std::int64_t group) const;
  void clear_rest(const AttentionCall& call) const;
  std::int64_t position_of(const AttentionCall& call, std::int64_t batch, std::int64_t token) const;
  HeadPreparation preparation(const AttentionCall& call, AttentionInput norm) const;

  // flow_qkv_attention.cc: tiles of queries.
  // Takes the memory that attend() needs for `call.plan`.
  void take_tiles(Scratch& scratch, AttentionCall& call) const;
  TileMemory tile_memory(Scratch& scratch, const AttentionCall& call) const;
  Tile tile_of(const AttentionCall& call, std::int64_t task) const;
  KeyRange seen_by(const AttentionRow& row, std::int64_t token) const;
  void fill(const AttentionCall& call, const Tile& tile, const TileMemory& memory) const;
  void sweep(const AttentionCall& call, const Tile& tile, const TileMemory& memory) const;
  void merge_parts(const AttentionCall& call, const Tile& tile) const;
  float denominator_of(const AttentionCall& call, std::int64_t head, float maximum,
                       float denominator) const;

  // flow_kv_attention.cc: parts of the keys.
  void take_states(Scratch& scratch, AttentionCall& call) const;
  PartState part_state(const AttentionCall& call, std::int64_t batch, std::int64_t token,
                       std::int64_t head, std::int64_t part) const;
  // Counts a part of a tile of queries as done; true if it was the last one.
  static bool was_last_part(const AttentionCall& call, std::int64_t tile);
  void merge_head(const AttentionCall& call, std::int64_t batch, std::int64_t token,
                  std::int64_t head) const;

  Context context_;
  AttentionAttributes attributes_;
  // Whether both present_key and present_value are outputs; whether at least one is.
  bool keeps_present_;
  bool writes_present_;
  std::int64_t cache_bytes_;
  DataType cache_type_ = DataType::kFloat32;
};

// Part `part` of `parts` parts of the keys. Parts end where chunks of keys end.
KeyRange part_of(KeyRange keys, std::int64_t part, std::int64_t parts);

}  // namespace flownpu::cpu
