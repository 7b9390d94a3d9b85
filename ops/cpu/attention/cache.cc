// SPDX-License-Identifier: Apache-2.0
// The KV cache of attention on the CPU: which positions its rows hold, appending to it with QK-norm
// and RoPE, and the compaction of window-sized caches.
#include <algorithm>
#include <cstring>

#include "ops/cpu/attention/step.h"

namespace flownpu::cpu {
namespace {

// Q, K and V of one token.
struct TokenHeads {
  const float* query;
  const float* key;
  const float* value;
};

TokenHeads heads_of(const AttentionCall& call, const AttentionAttributes& a, std::int64_t batch,
                    std::int64_t token) {
  const std::int64_t at = batch * call.tokens + token;
  const auto* query = call.input(kQuery).as<const float>();
  if (call.has_no_keys()) return {query + at * a.heads * a.head_size, nullptr, nullptr};
  if (call.input(kKey).present()) {
    return {query + at * a.heads * a.head_size,
            call.input(kKey).as<const float>() + at * a.kv_heads * a.head_size,
            call.input(kValue).as<const float>() + at * a.kv_heads * a.head_size};
  }
  // Packed: [H heads of Q, G of K, G of V].
  query += at * (a.heads + 2 * a.kv_heads) * a.head_size;
  const float* key = query + a.heads * a.head_size;
  return {query, key, key + a.kv_heads * a.head_size};
}

}  // namespace

std::int64_t FlowQKVAttention::resident(std::int64_t total, std::int64_t capacity) const {
  if (total <= capacity) return total;
  const std::int64_t evicted_at_once = capacity - attributes_.window + 1;
  return total - evicted_at_once * ((total - capacity + evicted_at_once - 1) / evicted_at_once);
}

AttentionRow FlowQKVAttention::prompt_row_of(const AttentionCall& call, std::int64_t batch) const {
  std::int64_t total = call.total;
  if (const Tensor& lengths = call.input(kSeqlensK); lengths.present()) {
    total = std::int64_t{lengths.as<const std::int32_t>()[batch]} + 1;
  }
  AttentionRow row{};
  row.past = call.is_first_prompt() ? 0 : total - call.prompt_tokens;
  row.tokens = total - row.past;
  return row;
}

AttentionRow FlowQKVAttention::row_of(const AttentionCall& call, std::int64_t batch) const {
  AttentionRow row = prompt_row_of(call, batch);
  // An earlier slice may have had all the tokens of a shorter row.
  const std::int64_t earlier = std::min(call.first_token, row.tokens);
  row.past += earlier;
  row.tokens = std::min(row.tokens - earlier, call.tokens);
  if (call.seen_tokens != nullptr) row.seen_tokens = call.seen_tokens + batch * call.tokens;
  if (attributes_.window_sized_cache) {
    const std::int64_t total = row.past + row.tokens;
    row.base_before = row.past - resident(row.past, call.capacity);
    row.base_after = total - resident(total, call.capacity);
  }
  return row;
}

void FlowQKVAttention::take_staged(Scratch& scratch, AttentionCall& call) const {
  if (call.has_no_keys()) return;
  // K and V are staged if there is no present to write to, or if a window-sized cache evicts tokens
  // that this call still reads.
  bool evicts = false;
  if (attributes_.window_sized_cache && call.tokens > 1) {
    for (std::int64_t b = 0; b < call.batch; ++b) {
      const AttentionRow row = row_of(call, b);
      evicts = evicts || row.base_before != row.base_after;
    }
  }
  if (keeps_present_ && !evicts) return;
  call.staged_rows = std::max(call.capacity, call.past_capacity + call.tokens);
  const std::int64_t bytes = call.batch * attributes_.kv_heads * call.staged_rows * call.row_bytes;
  call.staged_key = scratch.take<std::byte>(bytes);
  call.staged_value = scratch.take<std::byte>(bytes);
}

KeyValueRows FlowQKVAttention::cache_rows(const AttentionCall& call, std::int64_t batch,
                                          std::int64_t group) const {
  const std::int64_t head = batch * attributes_.kv_heads + group;
  const AttentionRow row = row_of(call, batch);
  if (call.has_no_keys()) {
    const std::int64_t offset = head * call.past_capacity * call.row_bytes;
    const auto rows = [&](AttentionInput past) {
      return const_cast<std::byte*>(call.input(past).as<const std::byte>()) + offset;
    };
    return {rows(kPastKey), rows(kPastValue), row.base_after};
  }
  if (call.staged()) {
    const std::int64_t offset = head * call.staged_rows * call.row_bytes;
    return {call.staged_key + offset, call.staged_value + offset, row.base_before};
  }
  const std::int64_t offset = head * call.capacity * call.row_bytes;
  return {call.outputs[kPresentKey].as<std::byte>() + offset,
          call.outputs[kPresentValue].as<std::byte>() + offset, row.base_after};
}

PastMove FlowQKVAttention::past_move(const AttentionCall& call, std::int64_t batch,
                                     std::int64_t group) const {
  const AttentionRow row = row_of(call, batch);
  const KeyValueRows to = cache_rows(call, batch, group);
  const std::int64_t bytes = (row.past - to.base) * call.row_bytes;
  if (bytes <= 0) return {to, nullptr, nullptr, 0};
  // The rows of the prompt's earlier slices are in the present.
  const bool later = call.first_token > 0;
  const std::int64_t from =
      ((batch * attributes_.kv_heads + group) * (later ? call.capacity : call.past_capacity) +
       to.base - row.base_before) *
      call.row_bytes;
  const Tensor& past_key = later ? call.outputs[kPresentKey] : call.input(kPastKey);
  const Tensor& past_value = later ? call.outputs[kPresentValue] : call.input(kPastValue);
  return {to, past_key.as<const std::byte>() + from, past_value.as<const std::byte>() + from,
          static_cast<std::size_t>(bytes)};
}

// Past and present are the same memory with shared buffers: then nothing moves, or rows move to the
// front.
void FlowQKVAttention::keep_past(const AttentionCall& call) const {
  // The distance to move grows evenly from head to head. If it is 0 for the first and the last
  // head, it is 0 for all.
  const auto stays = [&](std::int64_t batch) {
    return !past_move(call, batch, 0).needed() &&
           !past_move(call, batch, attributes_.kv_heads - 1).needed();
  };
  bool all_stay = true;
  for (std::int64_t batch = 0; batch < call.batch; ++batch) all_stay = all_stay && stays(batch);
  if (all_stay) return;
  context_.pool->run(call.batch * attributes_.kv_heads, [&](std::int64_t task) {
    const PastMove move = past_move(call, task / attributes_.kv_heads, task % attributes_.kv_heads);
    if (move.bytes == 0) return;
    if (move.key != move.to.key) std::memmove(move.to.key, move.key, move.bytes);
    if (move.value != move.to.value) std::memmove(move.to.value, move.value, move.bytes);
  });
}

void FlowQKVAttention::append(const AttentionCall& call) const {
  keep_past(call);
  context_.pool->run_rows(call.batch * call.tokens, [&](std::int64_t task) {
    const std::int64_t batch = task / call.tokens;
    const std::int64_t token = task % call.tokens;
    if (token < row_of(call, batch).tokens) append_token(call, batch, token);
  });
}

void FlowQKVAttention::append_token(const AttentionCall& call, std::int64_t batch,
                                    std::int64_t token) const {
  const std::int64_t d = attributes_.head_size;
  const AttentionRow row = row_of(call, batch);
  const TokenHeads from = heads_of(call, attributes_, batch, token);
  const std::int64_t position = position_of(call, batch, token);
  for (std::int64_t group = 0; group < attributes_.kv_heads; ++group) {
    alignas(64) float key[kMaxHeadSize];
    std::copy_n(from.key + group * d, d, key);
    preparation(call, kKNormWeight).prepare(context_.kernels, key, position);
    const KeyValueRows rows = cache_rows(call, batch, group);
    const std::int64_t offset = (row.past + token - rows.base) * call.row_bytes;
    context_.kernels.store_cache(key, rows.key + offset, call.cache_type, d);
    context_.kernels.store_cache(from.value + group * d, rows.value + offset, call.cache_type, d);
  }
}

void FlowQKVAttention::compact(const AttentionCall& call, std::int64_t batch,
                               std::int64_t group) const {
  const AttentionRow row = row_of(call, batch);
  const KeyValueRows from = cache_rows(call, batch, group);
  const std::int64_t skip = (row.base_after - row.base_before) * call.row_bytes;
  const auto bytes =
      static_cast<std::size_t>((row.past + row.tokens - row.base_after) * call.row_bytes);
  const std::int64_t to = (batch * attributes_.kv_heads + group) * call.capacity * call.row_bytes;
  const auto copy = [&](const Tensor& present, const std::byte* rows) {
    if (bytes > 0 && present.data != nullptr)
      std::memcpy(present.as<std::byte>() + to, rows + skip, bytes);
  };
  copy(call.outputs[kPresentKey], from.key);
  copy(call.outputs[kPresentValue], from.value);
}

// The operator leaves unspecified what a present holds where no token fills it. It is set to 0, so
// that reading all of a present gives the same in every run; a present that is the past's memory
// keeps what it holds.
void FlowQKVAttention::clear_rest(const AttentionCall& call) const {
  if (call.first_token + call.tokens < call.prompt_tokens) return;  // Later slices fill more.
  const auto clear = [&](AttentionOutput output, AttentionInput past, std::int64_t batch) {
    if (output >= call.outputs.size() || call.outputs[output].data == nullptr) return;
    if (call.outputs[output].data == call.input(past).data) return;
    const AttentionRow row = row_of(call, batch);
    const std::int64_t used = row.past + row.tokens - row.base_after;
    for (std::int64_t group = 0; group < attributes_.kv_heads; ++group) {
      const std::int64_t head = batch * attributes_.kv_heads + group;
      std::memset(
          call.outputs[output].as<std::byte>() + (head * call.capacity + used) * call.row_bytes, 0,
          static_cast<std::size_t>((call.capacity - used) * call.row_bytes));
    }
  };
  for (std::int64_t batch = 0; batch < call.batch; ++batch) {
    clear(kPresentKey, kPastKey, batch);
    clear(kPresentValue, kPastValue, batch);
  }
}

std::int64_t FlowQKVAttention::position_of(const AttentionCall& call, std::int64_t batch,
                                           std::int64_t token) const {
  const Tensor& ids = call.input(kPositionIds);
  if (!ids.present()) return row_of(call, batch).past + token;
  const auto* positions = ids.as<const std::int64_t>();
  if (!attributes_.counted_prompt) return positions[batch * call.tokens + token];
  // position_ids holds the whole prompt's positions, also where it is computed slice by slice.
  const std::int64_t at = call.first_token + token;
  return call.is_first_prompt() ? positions[0] + at : positions[batch * call.prompt_tokens + at];
}

HeadPreparation FlowQKVAttention::preparation(const AttentionCall& call,
                                              AttentionInput norm) const {
  return head_preparation(attributes_, call.input(norm), call.input(kCosCache),
                          call.input(kSinCache));
}

// How many tokens ahead queries are prefetched. Preparing the 1 KB of a token and group (two heads
// of 128) takes some 40 ns once it is in a cache, by a sampling profile; memory answers after some
// 100 ns. Other distances were not tried.
constexpr std::int64_t kTokensAhead = 2;

void FlowQKVAttention::prepare_queries(const AttentionCall& call, std::int64_t batch,
                                       std::int64_t group, std::int64_t token, float* out) const {
  const std::int64_t elements = attributes_.heads_per_group() * attributes_.head_size;
  const std::int64_t position = position_of(call, batch, token);
  const auto query = [&](std::int64_t of) {
    return heads_of(call, attributes_, batch, of).query + group * elements;
  };
  // The queries of one group lie a row apart, so the processor does not fetch the next query by
  // itself.
  const float* later = query(std::min(token + kTokensAhead, call.tokens - 1));
  constexpr std::int64_t kLine = 64 / sizeof(float);
  for (std::int64_t i = 0; i < elements; i += kLine) __builtin_prefetch(later + i);
  preparation(call, kQNormWeight)
      .prepare_queries(context_.kernels, query(token), attributes_.heads_per_group(), position,
                       attributes_.scale, out);
}

}  // namespace flownpu::cpu
