// SPDX-License-Identifier: Apache-2.0
// The checks of attention on the CPU. Nodes are checked when they are prepared. A call is checked
// before anything is written, and before anything but lengths and positions is read.
#include <algorithm>
#include <array>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

#include "ops/cpu/attention/step.h"
#include "ops/error.h"

namespace flownpu::cpu {
namespace {

// These inputs are all present or all absent.
constexpr std::array<std::pair<AttentionInput, AttentionInput>, 5> kPairs{{
    {kKey, kValue},
    {kPastKey, kPastValue},
    {kSeqlensK, kTotalSequenceLength},
    {kCosCache, kSinCache},
    {kQNormWeight, kKNormWeight},
}};

// The size of a process's address space on x86-64: 47 bits.
constexpr std::int64_t kMostBytes = std::int64_t{1} << 47;

std::string_view name_of(AttentionInput input) { return kAttentionPorts[input].name; }

void check_shape(const std::string& name, const Tensor& input, AttentionInput index,
                 const Shape& expected) {
  if (input.shape == expected) return;
  fail("[", name, "] expected ", name_of(index), " of shape ", to_string(expected), ", got ",
       to_string(input.shape));
}

// Throws Error if a tensor of these sizes, the last of which is in bytes, cannot be addressed. A
// size of 0 counts as 1: memory is planned by the other sizes.
void check_bytes(const std::string& name, std::initializer_list<std::int64_t> sizes) {
  std::int64_t bytes = 1;
  for (const std::int64_t size : sizes) {
    if (__builtin_mul_overflow(bytes, std::max<std::int64_t>(size, 1), &bytes) ||
        bytes > kMostBytes) {
      fail("[", name, "] expected a query and a KV cache of at most 128 TiB each, which is what a ",
           "process can address, got ", to_string(Shape(sizes)), " bytes");
    }
  }
}

void check_new_tokens(const AttentionAttributes& attributes, const AttentionCall& call) {
  const std::string& name = attributes.name;
  const std::int64_t d = attributes.head_size;
  const Shape& query = call.input(kQuery).shape;
  const bool packed = !call.input(kKey).present();
  const std::int64_t width = (attributes.heads + (packed ? 2 * attributes.kv_heads : 0)) * d;
  if (query.rank() != 3 || query[2] != width) {
    fail("[", name, "] expected a query of shape [batch, tokens, ", width, "], got ",
         to_string(query));
  }
  check_bytes(name, {call.batch, call.prompt_tokens, width, sizeof(float)});
  if (packed) return;
  const Shape keys{call.batch, call.tokens, attributes.kv_heads * d};
  const Shape none{call.batch, 0, attributes.kv_heads * d};
  if (call.tokens > 0 && call.input(kKey).shape == none && call.input(kValue).shape == none) return;
  check_shape(name, call.input(kKey), kKey, keys);
  check_shape(name, call.input(kValue), kValue, keys);
}

void check_past(const AttentionAttributes& attributes, const AttentionCall& call) {
  const Tensor& past = call.input(kPastKey);
  if (!past.present()) return;
  const Shape& shape = past.shape;
  const std::int64_t columns = cache_columns(past.type, attributes.head_size);
  if (shape.rank() != 4 || shape[0] != call.batch || shape[1] != attributes.kv_heads ||
      shape[2] > kMostPositions || shape[3] != columns ||
      !(call.input(kPastValue).shape == shape)) {
    fail("[", attributes.name, "] expected past_key and past_value of shape [", call.batch, ",",
         attributes.kv_heads, ",?,", columns, "], got ", to_string(shape), " and ",
         to_string(call.input(kPastValue).shape),
         past.type == DataType::kInt8 ? ": a row of an int8 cache is head_size codes and 4 bytes"
                                        " of scale (is head_size in genai_config.json that?)"
                                      : "");
  }
}

// seqlens_k may be [batch] or, as a Cast of a ReduceSum is, [batch, 1].
void check_length_shapes(const AttentionAttributes& attributes, const AttentionCall& call) {
  const Tensor& lengths = call.input(kSeqlensK);
  if (!lengths.present()) return;
  if (lengths.shape.elements() != call.batch) {
    fail("[", attributes.name, "] expected seqlens_k of shape [", call.batch, "], got ",
         to_string(lengths.shape));
  }
  const Tensor& total = call.input(kTotalSequenceLength);
  if (!total.present() || total.shape.elements() != 1) {
    fail("[", attributes.name, "] expected one number in total_sequence_length, got shape ",
         to_string(total.shape));
  }
}

void check_rotary(const AttentionAttributes& attributes, const AttentionCall& call) {
  if (!attributes.rotary) return;
  const std::string& name = attributes.name;
  const Shape& table = call.input(kCosCache).shape;
  if (table.rank() != 2 || table[1] > attributes.head_size / 2 ||
      !(call.input(kSinCache).shape == table)) {
    fail("[", name, "] expected cos_cache and sin_cache of shape [positions, at most ",
         attributes.head_size / 2, "], got ", to_string(table), " and ",
         to_string(call.input(kSinCache).shape));
  }
  const Tensor& ids = call.input(kPositionIds);
  if (!ids.present()) return;
  const Shape expected{call.batch, attributes.counted_prompt ? call.prompt_tokens : call.tokens};
  // ONNX Runtime accepts more position_ids than there are tokens, and reads the first ones.
  if (!(ids.shape == expected) && ids.shape.rank() >= 2 && ids.shape[0] == call.batch &&
      ids.shape[1] >= expected[1]) {
    unsupported("[", name, "] expected position_ids of shape ", to_string(expected), ", got ",
                to_string(ids.shape), ": give as many as there are tokens, or set the provider ",
                "option on_unsupported to cpu");
  }
  check_shape(name, ids, kPositionIds, expected);
}

void check_others(const AttentionAttributes& attributes, const AttentionCall& call) {
  const std::string& name = attributes.name;
  for (const AttentionInput norm : {kQNormWeight, kKNormWeight}) {
    const Tensor& weight = call.input(norm);
    if (weight.present() && weight.shape.elements() != attributes.head_size)
      check_shape(name, weight, norm, {attributes.head_size});
  }
  if (const Tensor& blocks = call.input(kBidirectionalBlocks); blocks.present())
    check_shape(name, blocks, kBidirectionalBlocks, {call.batch, call.prompt_tokens});
  if (const Tensor& sink = call.input(kHeadSink); sink.present())
    check_shape(name, sink, kHeadSink, {attributes.heads});
}

void check_bias(const AttentionAttributes& attributes, const AttentionCall& call) {
  const Tensor& bias = call.input(kAttentionBias);
  if (!bias.present()) return;
  const Shape& shape = bias.shape;
  if (shape.rank() == 4 && (shape[0] == 1 || shape[0] == call.batch) &&
      (shape[1] == 1 || shape[1] == attributes.heads) && shape[2] == call.prompt_tokens &&
      shape[3] >= call.total) {
    return;
  }
  fail("[", attributes.name, "] expected attention_bias of shape [1 or ", call.batch, ", 1 or ",
       attributes.heads, ", ", call.prompt_tokens, ", at least ", call.total, "], got ",
       to_string(shape));
}

// T of a cache that is not window-sized is at most the past's capacity plus the new tokens.
void check_total(const AttentionAttributes& attributes, const AttentionCall& call) {
  const std::int64_t room = call.past_capacity + (call.has_no_keys() ? 0 : call.prompt_tokens);
  const std::int64_t most = attributes.window_sized_cache ? kMostPositions : room;
  if (call.total < 0 || call.total > std::min(most, kMostPositions)) {
    fail("[", attributes.name, "] expected total_sequence_length between 0 and ",
         std::min(most, kMostPositions), ", got ", call.total);
  }
  // A cache smaller than the window suffices for a sequence that ends before the cache is full.
  if (attributes.window_sized_cache && call.capacity < attributes.window &&
      call.total > call.capacity) {
    fail("[", attributes.name, "] expected a window-sized KV cache of at least ", attributes.window,
         " positions, got ", call.capacity,
         ": set past_present_share_buffer to true, or convert without it");
  }
  check_bytes(attributes.name,
              {call.batch, attributes.kv_heads,
               std::max(call.capacity, call.past_capacity + call.prompt_tokens), call.row_bytes});
}

}  // namespace

void check_inputs(const Node& node, const AttentionAttributes& attributes) {
  const std::string& name = attributes.name;
  const auto has = [&](AttentionInput input) { return node.input(input) != nullptr; };
  if (attributes.rotary && !(has(kCosCache) && has(kSinCache)))
    fail("[", name, "] expected cos_cache and sin_cache with do_rotary = 1");
  for (const auto& [one, other] : kPairs) {
    if (has(one) != has(other)) {
      fail("[", name, "] expected both ", name_of(one), " and ", name_of(other), " or neither");
    }
  }
  if (attributes.window_sized_cache && !has(kPastKey))
    fail("[", name, "] expected past_key and past_value with sliding_window_cache = 1");
}

// A call without keys and values reads those that another layer has put into its past.
void FlowQKVAttention::check_without_keys(const AttentionCall& call) const {
  if (!call.has_no_keys()) return;
  const std::string& name = attributes_.name;
  if (!call.input(kPastKey).present())
    fail("[", name, "] expected past_key and past_value beside keys and values of no tokens");
  if (writes_present_) {
    unsupported("[", name, "] expected no present_key and present_value beside keys and values of ",
                "no tokens: leave them out, or set the provider option on_unsupported to cpu");
  }
  if (attributes_.window_sized_cache && call.tokens > 1) {
    unsupported("[", name, "] expected one token beside keys and values of no tokens, with ",
                "sliding_window_cache = 1, got ", call.tokens,
                ": set the provider option on_unsupported to cpu");
  }
}

void FlowQKVAttention::check_shapes(std::span<const Tensor> inputs) const {
  const AttentionCall call(inputs, {});
  check_new_tokens(attributes_, call);
  check_without_keys(call);
  check_past(attributes_, call);
  check_length_shapes(attributes_, call);
  check_rotary(attributes_, call);
  check_others(attributes_, call);
}

void FlowQKVAttention::check_lengths(const AttentionCall& call) const {
  const std::string& name = attributes_.name;
  check_total(attributes_, call);
  check_bias(attributes_, call);
  for (std::int64_t b = 0; b < call.batch; ++b) {
    const AttentionRow prompt = prompt_row_of(call, b);
    const std::int64_t length = prompt.past + prompt.tokens;
    if (prompt.past < 0 || prompt.tokens < 0) {
      fail("[", name, "] expected seqlens_k + 1 of row ", b, " to be at least ",
           call.is_first_prompt() ? 0 : call.prompt_tokens, ", got ", length,
           length < 0 ? ": does its attention_mask begin with 0? Pad prompts on the right" : "");
    }
    if (!attributes_.window_sized_cache && prompt.past > call.past_capacity) {
      fail("[", name, "] expected a past of at least ", prompt.past, " positions, got ",
           call.past_capacity);
    }
    // ONNX Runtime takes lengths up to the cache's capacity, whatever T is.
    if (prompt.tokens > call.prompt_tokens || length > call.total) {
      unsupported("[", name, "] expected seqlens_k + 1 of row ", b,
                  " to be at most total_sequence_length = ", call.total, ", got ", length,
                  ": give the longest row's length as total_sequence_length, or set the provider ",
                  "option on_unsupported to cpu");
    }
    // The first slice of a prompt checks positions for all, before any slice has changed the cache.
    const bool in_slices = call.input(kPositionIds).present() && !attributes_.counted_prompt;
    if (attributes_.rotary) check_positions(call, b, in_slices ? row_of(call, b) : prompt);
  }
  check_block_numbers(call);
}

void FlowQKVAttention::check_positions(const AttentionCall& call, std::int64_t batch,
                                       const AttentionRow& row) const {
  if (row.tokens == 0) return;
  const std::int64_t positions = call.input(kCosCache).shape[0];
  std::int64_t first = row.past;
  std::int64_t last = row.past + row.tokens - 1;
  if (const Tensor& ids = call.input(kPositionIds); ids.present()) {
    const auto* all = ids.as<const std::int64_t>();
    if (attributes_.counted_prompt && call.is_first_prompt()) {
      first = std::clamp<std::int64_t>(all[0], -1, kMostPositions);
      last = first + row.tokens - 1;
    } else {
      const auto* row_ids = all + batch * ids.shape[1];
      const auto [smallest, largest] = std::minmax_element(row_ids, row_ids + row.tokens);
      first = *smallest;
      last = *largest;
    }
  }
  if (first >= 0 && last < positions) return;
  fail("[", attributes_.name, "] expected positions below ", positions,
       ", which is what the model's RoPE tables hold, got ", first < 0 ? first : last,
       ": shorten the context");
}

}  // namespace flownpu::cpu
