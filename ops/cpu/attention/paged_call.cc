// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/attention/paged_call.h"

#include <algorithm>
#include <string>

#include "ops/error.h"

namespace flownpu::cpu {
namespace {

void check_boundaries(const std::string& name, const PagedCall& call) {
  const Tensor& boundaries = call.input(kCumulativeSequenceLengths);
  if (boundaries.shape[0] != call.sequences() + 1) {
    fail("[", name, "] expected ", call.sequences() + 1,
         " cumulative_sequence_lengths, one more than past_sequence_lengths, got ",
         boundaries.shape[0]);
  }
  const auto* at = boundaries.as<const std::int32_t>();
  bool grow = at[0] == 0 && at[call.sequences()] == call.tokens();
  for (std::int64_t s = 0; s < call.sequences(); ++s) grow = grow && at[s] <= at[s + 1];
  if (!grow) {
    fail("[", name, "] expected cumulative_sequence_lengths that grow from 0 to the ",
         call.tokens(), " tokens of the query, got ", at[0], " to ", at[call.sequences()]);
  }
}

void check_sequence(const AttentionAttributes& attributes, const PagedCall& call,
                    std::int64_t index) {
  const std::string& name = attributes.name;
  const PagedSequence sequence = call.sequence(index);
  const std::int64_t total = sequence.past + sequence.tokens;
  if (sequence.past < 0 || total > kMostPositions) {
    fail("[", name, "] expected past_sequence_lengths from 0 on, and no more than ", kMostPositions,
         " tokens with the new ones, got ", sequence.past, " of sequence ", index);
  }
  if (sequence.tokens == 0) return;
  const std::int64_t columns = call.input(kBlockTable).shape[1];
  const std::int64_t needed = (total + call.block_rows() - 1) / call.block_rows();
  if (needed > columns) {
    fail("[", name, "] expected a block_table of at least ", needed, " blocks of ",
         call.block_rows(), " tokens for the ", total, " of sequence ", index, ", got ", columns);
  }
  const std::int64_t blocks = call.input(kKeyCache).shape[0];
  for (std::int64_t i = 0; i < needed; ++i) {
    if (sequence.table[i] >= 0 && sequence.table[i] < blocks) continue;
    fail("[", name, "] expected blocks below ", blocks, ", which is what key_cache has, got ",
         sequence.table[i], " at ", i, " in block_table of sequence ", index);
  }
  if (!attributes.rotary) return;
  if (const std::int64_t positions = call.input(kPagedCosCache).shape[0]; total > positions) {
    fail("[", name, "] expected positions below ", positions,
         ", which is what the model's RoPE tables hold, got ", total - 1, ": shorten the context");
  }
}

}  // namespace

PagedCall::PagedCall(const AttentionAttributes& attributes, std::span<const Tensor> inputs,
                     std::span<const Tensor> outputs)
    : attributes_(attributes),
      inputs_(inputs),
      outputs_(outputs),
      row_bytes_(attributes.kv_heads * attributes.head_size *
                 static_cast<std::int64_t>(size_of(inputs[kKeyCache].type))) {}

const Tensor& PagedCall::input(PagedInput index) const {
  static const Tensor absent;
  return index < inputs_.size() ? inputs_[index] : absent;
}

PagedSequence PagedCall::sequence(std::int64_t index) const {
  const auto* boundaries = inputs_[kCumulativeSequenceLengths].as<const std::int32_t>();
  const std::int64_t columns = inputs_[kBlockTable].shape[1];
  return {boundaries[index], std::int64_t{boundaries[index + 1]} - boundaries[index],
          inputs_[kPastSequenceLengths].as<const std::int32_t>()[index],
          inputs_[kBlockTable].as<const std::int32_t>() + index * columns};
}

PagedSequence PagedCall::sequence_of(std::int64_t token) const {
  const auto* boundaries = inputs_[kCumulativeSequenceLengths].as<const std::int32_t>();
  return sequence(std::upper_bound(boundaries, boundaries + sequences() + 1, token) - boundaries -
                  1);
}

const float* PagedCall::heads(std::int64_t token, std::int64_t head) const {
  const std::int64_t all = attributes_.heads + 2 * attributes_.kv_heads;
  return inputs_[kPagedQuery].as<const float>() + (token * all + head) * attributes_.head_size;
}

const float* PagedCall::query(std::int64_t token, std::int64_t head) const {
  return heads(token, head);
}

const float* PagedCall::key(std::int64_t token, std::int64_t group) const {
  return heads(token, attributes_.heads + group);
}

const float* PagedCall::value(std::int64_t token, std::int64_t group) const {
  return heads(token, attributes_.heads + attributes_.kv_heads + group);
}

float* PagedCall::output(std::int64_t token, std::int64_t head) const {
  return outputs_[kPagedOutput].as<float>() +
         (token * attributes_.heads + head) * attributes_.head_size;
}

HeadPreparation PagedCall::preparation(PagedInput norm) const {
  return head_preparation(attributes_, input(norm), input(kPagedCosCache), input(kPagedSinCache));
}

std::int64_t PagedCall::head_offset(std::int64_t group) const {
  return group * (row_bytes_ / attributes_.kv_heads);
}

std::int64_t PagedCall::cache_offset(const PagedSequence& sequence, std::int64_t position,
                                     std::int64_t group) const {
  const std::int64_t block = sequence.table[position / block_rows()];
  return (block * block_rows() + position % block_rows()) * row_bytes_ + head_offset(group);
}

CacheBlocks PagedCall::blocks(const PagedSequence& sequence) const {
  return {sequence.table, block_rows(), block_rows() * row_bytes_};
}

void check_paged_node(const Node& node, const AttentionAttributes& attributes) {
  const std::string& name = attributes.name;
  const auto has = [&](PagedInput input) { return node.input(input) != nullptr; };
  if (attributes.rotary && !(has(kPagedCosCache) && has(kPagedSinCache)))
    fail("[", name, "] expected cos_cache and sin_cache with do_rotary = 1");
  if (has(kPagedQNormWeight) != has(kPagedKNormWeight))
    fail("[", name, "] expected both q_norm_weight and k_norm_weight or neither");
}

void check_paged_call(const AttentionAttributes& attributes, const PagedCall& call) {
  const std::string& name = attributes.name;
  const std::int64_t d = attributes.head_size;
  const std::int64_t width = (attributes.heads + 2 * attributes.kv_heads) * d;
  const Shape& query = call.input(kPagedQuery).shape;
  if (query[1] != width)
    fail("[", name, "] expected a query of shape [tokens, ", width, "], got ", to_string(query));
  const Shape& cache = call.input(kKeyCache).shape;
  if (cache[1] < 1 || cache[2] != attributes.kv_heads || cache[3] != d) {
    fail("[", name, "] expected key_cache of shape [blocks, tokens of a block, ",
         attributes.kv_heads, ", ", d, "], got ", to_string(cache));
  }
  if (const Shape& table = call.input(kPagedCosCache).shape; attributes.rotary && table[1] > d / 2)
    fail("[", name, "] expected cos_cache of shape [positions, at most ", d / 2, "], got ",
         to_string(table));
  check_boundaries(name, call);
  for (std::int64_t s = 0; s < call.sequences(); ++s) check_sequence(attributes, call, s);
}

}  // namespace flownpu::cpu
