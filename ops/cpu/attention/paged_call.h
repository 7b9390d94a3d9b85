// SPDX-License-Identifier: Apache-2.0
// One call of PagedAttention: its sequences, and where their tokens and their keys and values lie.
// ops/definitions/paged_attention.py says what the operator means.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "ops/cpu/attention/heads.h"
#include "ops/nodes/paged_attention.h"

namespace flownpu::cpu {

// Tokens [first, first + tokens) of the call, before which `past` tokens are in the cache; `table`
// is the sequence's row of block_table.
struct PagedSequence {
  std::int64_t first;
  std::int64_t tokens;
  std::int64_t past;
  const std::int32_t* table;
};

// The views and numbers of one call, N new tokens of B sequences.
class PagedCall {
 public:
  PagedCall(const AttentionAttributes& attributes, std::span<const Tensor> inputs,
            std::span<const Tensor> outputs);

  // An input that the node does not list is absent.
  const Tensor& input(PagedInput index) const;
  std::int64_t tokens() const { return inputs_[kPagedQuery].shape[0]; }
  std::int64_t sequences() const { return inputs_[kPastSequenceLengths].shape[0]; }
  // Rows of a block: tokens that it has room for.
  std::int64_t block_rows() const { return inputs_[kKeyCache].shape[1]; }
  DataType cache_type() const { return inputs_[kKeyCache].type; }

  PagedSequence sequence(std::int64_t index) const;
  // The sequence that a token of the call belongs to.
  PagedSequence sequence_of(std::int64_t token) const;

  // A token's query, key, value or output, from the given head on: f32 [head_size] for each head.
  const float* query(std::int64_t token, std::int64_t head) const;
  const float* key(std::int64_t token, std::int64_t group) const;
  const float* value(std::int64_t token, std::int64_t group) const;
  float* output(std::int64_t token, std::int64_t head) const;
  HeadPreparation preparation(PagedInput norm) const;

  // The caches after the call. Both have the same layout, of which the next three are in bytes.
  std::byte* key_cache() const { return outputs_[kKeyCacheOut].as<std::byte>(); }
  std::byte* value_cache() const { return outputs_[kValueCacheOut].as<std::byte>(); }
  // From a row's begin to a KV head.
  std::int64_t head_offset(std::int64_t group) const;
  // From the cache's begin to a KV head at a position of a sequence.
  std::int64_t cache_offset(const PagedSequence& sequence, std::int64_t position,
                            std::int64_t group) const;
  // From a row to the next.
  std::int64_t row_bytes() const { return row_bytes_; }
  CacheBlocks blocks(const PagedSequence& sequence) const;

 private:
  // Packed: [H heads of Q, G of K, G of V].
  const float* heads(std::int64_t token, std::int64_t head) const;

  const AttentionAttributes& attributes_;
  std::span<const Tensor> inputs_;
  std::span<const Tensor> outputs_;
  std::int64_t row_bytes_;
};

// Throws Error if an input of the node is given without the inputs that it needs.
void check_paged_node(const Node& node, const AttentionAttributes& attributes);
// Throws Error unless shapes fit the node, lengths add up, and every position in use has a block of
// the cache. Shapes and ranks must already fit the contract.
void check_paged_call(const AttentionAttributes& attributes, const PagedCall& call);

}  // namespace flownpu::cpu
