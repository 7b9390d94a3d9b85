// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops/error.h"

namespace flownpu::cpu {
namespace {

const Tensor& input(const AttentionCall& call, AttentionInput index) {
  static const Tensor absent;
  return index < call.inputs.size() ? call.inputs[index] : absent;
}

// K or V of one token in a query that packs all three: [H heads of Q, G of K, G of V].
struct TokenHeads {
  const float* query;
  const float* key;
  const float* value;
};

TokenHeads heads_of(const AttentionCall& call, const AttentionAttributes& a, std::int64_t batch,
                    std::int64_t token) {
  const std::int64_t at = batch * call.tokens + token;
  const auto* query = input(call, kQuery).as<const float>();
  if (input(call, kKey).present()) {
    return {query + at * a.heads * a.head_size,
            input(call, kKey).as<const float>() + at * a.kv_heads * a.head_size,
            input(call, kValue).as<const float>() + at * a.kv_heads * a.head_size};
  }
  query += at * (a.heads + 2 * a.kv_heads) * a.head_size;
  const float* key = query + a.heads * a.head_size;
  return {query, key, key + a.kv_heads * a.head_size};
}

// Keys that a layer without a window is taken to see in the placement report, where the context is
// not known.
constexpr std::int64_t kNominalKeys = 64;

bool staged(const AttentionCall& call) { return call.staged_key != nullptr; }

}  // namespace

const float* attention_bias_row(const AttentionCall& call, std::int64_t batch, std::int64_t head,
                                std::int64_t token) {
  const Tensor& bias = call.inputs[kAttentionBias];
  const Shape& shape = bias.shape;
  const std::int64_t b = shape[0] == 1 ? 0 : batch;
  const std::int64_t h = shape[1] == 1 ? 0 : head;
  return bias.as<const float>() +
         ((b * shape[1] + h) * shape[2] + call.first_token + token) * shape[3];
}

AttentionAttributes::AttentionAttributes(const Node& node)
    : name(to_string(node)),
      heads(node.required_integer("num_heads")),
      kv_heads(node.integer("kv_num_heads", heads)),
      head_size(node.required_integer("head_size")),
      scale(node.number("scale", 0.0F)),
      softcap(node.number("softcap", 0.0F)),
      window(std::max<std::int64_t>(node.integer("local_window_size", -1), 0)),
      causal(node.integer("causal", 1) != 0),
      rotary(node.integer("do_rotary", 0) != 0),
      rotary_interleaved(node.integer("rotary_interleaved", 0) != 0),
      norm_epsilon(node.number("qk_norm_epsilon", 1e-6F)),
      window_sized_cache(node.integer("sliding_window_cache", 0) != 0) {
  if (heads <= 0 || kv_heads <= 0 || heads % kv_heads != 0) {
    fail("[", name, "] expected num_heads to be a multiple of kv_num_heads, got ", heads, " and ",
         kv_heads);
  }
  if (head_size <= 0 || head_size > kMaxHeadSize) {
    fail("[", name, "] expected head_size in 1..", kMaxHeadSize, ", got ", head_size);
  }
  if (window > 0 && !causal)
    fail("[", name, "] expected no local_window_size with causal = 0, got ", window);
  if (window_sized_cache && window == 0)
    fail("[", name, "] expected local_window_size with sliding_window_cache = 1");
  if (scale == 0.0F) scale = 1.0F / std::sqrt(static_cast<float>(head_size));
}

FlowAttention::FlowAttention(const Node& node, const Context& context)
    : context_(context),
      attributes_(node),
      keeps_present_(node.has_output(kPresentKey) && node.has_output(kPresentValue)),
      cache_bytes_(cache_bytes()) {
  if (attributes_.rotary &&
      (node.input(kCosCache) == nullptr || node.input(kSinCache) == nullptr)) {
    fail("[", attributes_.name, "] expected cos_cache and sin_cache with do_rotary = 1");
  }
  if ((node.input(kPastKey) == nullptr) != (node.input(kPastValue) == nullptr)) {
    fail("[", attributes_.name, "] expected both past_key and past_value or neither");
  }
  if (node.has_output(kPresentKey)) cache_type_ = node.outputs[kPresentKey].type;
  if (const Value* past = node.input(kPastKey); past != nullptr) cache_type_ = past->type;
  if (cache_type_ != DataType::kBFloat16 && cache_type_ != DataType::kFloat16 &&
      cache_type_ != DataType::kFloat32) {
    fail("[", attributes_.name, "] expected a KV cache of type bfloat16, float16 or float, got ",
         name_of(cache_type_));
  }
}

std::int64_t FlowAttention::multiply_adds() const {
  const std::int64_t keys = attributes_.window > 0 ? attributes_.window : kNominalKeys;
  return 2 * attributes_.heads * attributes_.head_size * keys;
}

std::optional<Slicing> FlowAttention::slicing(const Node& /*node*/) const {
  if (!attributes_.causal || !keeps_present_) return std::nullopt;
  return Slicing{
      .inputs = {kQuery, kKey, kValue, kPositionIds}, .outputs = {kOutput}, .holds_tokens = true};
}

AttentionCall FlowAttention::describe(std::span<const Tensor> inputs,
                                      std::span<const Tensor> outputs) const {
  AttentionCall call{};
  call.inputs = inputs;
  call.outputs = outputs;
  const Shape& query = inputs[kQuery].shape;
  const bool packed = !input(call, kKey).present();
  const std::int64_t width =
      (attributes_.heads + (packed ? 2 * attributes_.kv_heads : 0)) * attributes_.head_size;
  if (query.rank() != 3 || query[2] != width) {
    fail("[", attributes_.name, "] expected a query of shape [batch, tokens, ", width, "], got ",
         to_string(query));
  }
  call.batch = query[0];
  call.tokens = query[1];
  call.first_token = inputs[kQuery].slice.first;
  call.prompt_tokens = inputs[kQuery].slice.tokens > 0 ? inputs[kQuery].slice.tokens : call.tokens;
  if (const Tensor& past = input(call, kPastKey); past.present()) {
    const Shape& shape = past.shape;
    if (shape.rank() != 4 || shape[0] != call.batch || shape[1] != attributes_.kv_heads ||
        shape[3] != attributes_.head_size || !(input(call, kPastValue).shape == shape)) {
      fail("[", attributes_.name, "] expected past_key and past_value of shape [", call.batch, ",",
           attributes_.kv_heads, ",?,", attributes_.head_size, "], got ", to_string(shape), " and ",
           to_string(input(call, kPastValue).shape));
    }
    call.past_capacity = shape[2];
  }
  call.total = call.past_capacity + call.prompt_tokens;
  if (const Tensor& total = input(call, kTotalSequenceLength);
      total.present() && total.data != nullptr) {
    call.total = *total.as<const std::int32_t>();
  }
  call.capacity = attributes_.window_sized_cache ? call.past_capacity
                                                 : std::max(call.past_capacity, call.total);
  call.cache_type = cache_type_;
  const Kernels& kernels = context_.kernels;
  AttentionShape shape{call.batch,
                       attributes_.kv_heads,
                       attributes_.heads_per_group(),
                       attributes_.head_size,
                       call.tokens,
                       call.total,
                       attributes_.window,
                       static_cast<std::int64_t>(size_of(call.cache_type))};
  const AttentionMachine machine{context_.pool->threads(), cache_bytes_, kernels.few_rows,
                                 kernels.block_rows,
                                 kernels.attention_element(attributes_.head_size, call.cache_type)};
  call.plan = plan_attention(shape, machine);
  shape.total = std::max(call.total, call.capacity);
  const AttentionPlan most = plan_attention(shape, machine);
  call.most_slots = std::max(call.plan.slots, most.slots);
  call.most_parts = std::max(call.plan.parts, most.parts);
  return call;
}

void FlowAttention::infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const {
  const AttentionCall call = describe(inputs, {});
  outputs[kOutput] = Shape{call.batch, call.tokens, attributes_.heads * attributes_.head_size};
  for (std::size_t i = kPresentKey; i < outputs.size(); ++i) {
    outputs[i] = Shape{call.batch, attributes_.kv_heads, call.capacity, attributes_.head_size};
  }
}

std::int64_t FlowAttention::resident(std::int64_t total, std::int64_t capacity) const {
  if (total <= capacity) return total;
  const std::int64_t evicted_at_once = capacity - attributes_.window + 1;
  return total - evicted_at_once * ((total - capacity + evicted_at_once - 1) / evicted_at_once);
}

AttentionRow FlowAttention::prompt_row_of(const AttentionCall& call, std::int64_t batch) const {
  std::int64_t total = call.total;
  if (const Tensor& lengths = input(call, kSeqlensK); lengths.present()) {
    total = std::int64_t{lengths.as<const std::int32_t>()[batch]} + 1;
  }
  AttentionRow row{};
  // GroupQueryAttention's rule: a call that brings all tokens so far is a first prompt, whose
  // shorter rows are padded on the right; in any other call every row brings S tokens.
  row.past = call.prompt_tokens == call.total ? 0 : total - call.prompt_tokens;
  row.tokens = total - row.past;
  return row;
}

AttentionRow FlowAttention::row_of(const AttentionCall& call, std::int64_t batch) const {
  AttentionRow row = prompt_row_of(call, batch);
  // A shorter row may have had all its tokens in earlier slices.
  const std::int64_t earlier = std::min(call.first_token, row.tokens);
  row.past += earlier;
  row.tokens = std::min(row.tokens - earlier, call.tokens);
  if (attributes_.window_sized_cache) {
    const std::int64_t total = row.past + row.tokens;
    row.base_before = row.past - resident(row.past, call.capacity);
    row.base_after = total - resident(total, call.capacity);
  }
  return row;
}

void FlowAttention::check(const AttentionCall& call) const {
  if (attributes_.window_sized_cache && call.capacity < attributes_.window) {
    fail("[", attributes_.name, "] expected a window-sized KV cache of at least ",
         attributes_.window, " positions, got ", call.capacity,
         ": set past_present_share_buffer to true, or convert without it");
  }
  for (std::int64_t b = 0; b < call.batch; ++b) {
    const AttentionRow prompt = prompt_row_of(call, b);
    if (prompt.past < 0 || prompt.tokens < 0 || prompt.tokens > call.prompt_tokens ||
        prompt.past + prompt.tokens > call.total) {
      fail("[", attributes_.name, "] expected seqlens_k + 1 of row ", b, " between ",
           call.prompt_tokens, " and total_sequence_length = ", call.total, ", got ",
           prompt.past + prompt.tokens);
    }
    if (!attributes_.window_sized_cache && prompt.past > call.past_capacity) {
      fail("[", attributes_.name, "] expected a past of at least ", prompt.past, " positions, got ",
           call.past_capacity);
    }
    // Of a prompt in slices the first tells, before any of them has changed the cache.
    const bool given = input(call, kPositionIds).present();
    if (attributes_.rotary) check_positions(call, b, given ? row_of(call, b) : prompt);
  }
  if (const Tensor& bias = input(call, kAttentionBias); bias.present()) {
    const Shape& shape = bias.shape;
    if (shape.rank() != 4 || (shape[0] != 1 && shape[0] != call.batch) ||
        (shape[1] != 1 && shape[1] != attributes_.heads) || shape[2] != call.prompt_tokens ||
        shape[3] < call.total) {
      fail("[", attributes_.name, "] expected attention_bias of shape [1 or ", call.batch,
           ", 1 or ", attributes_.heads, ", ", call.prompt_tokens, ", at least ", call.total,
           "], got ", to_string(shape));
    }
  }
}

void FlowAttention::check_positions(const AttentionCall& call, std::int64_t batch,
                                    const AttentionRow& row) const {
  const std::int64_t positions = input(call, kCosCache).shape[0];
  std::int64_t first = row.past;
  std::int64_t last = row.past + row.tokens - 1;
  if (const Tensor& ids = input(call, kPositionIds); ids.present()) {
    const auto* row_ids = ids.as<const std::int64_t>() + batch * call.tokens;
    const auto [smallest, largest] = std::minmax_element(row_ids, row_ids + row.tokens);
    if (row.tokens > 0) {
      first = *smallest;
      last = *largest;
    }
  }
  if (first >= 0 && last < positions) return;
  fail("[", attributes_.name, "] expected positions below ", positions,
       ", which is what the model's RoPE tables hold, ", "got ", first < 0 ? first : last,
       ": shorten the context");
}

void FlowAttention::take(Scratch& scratch, AttentionCall& call) const {
  take_tiles(scratch, call);
  // Without a present to write to, or when a window-sized cache evicts tokens that this call still
  // reads.
  bool evicts = false;
  if (attributes_.window_sized_cache && call.tokens > 1) {
    for (std::int64_t b = 0; b < call.batch; ++b) {
      const AttentionRow row = row_of(call, b);
      evicts = evicts || row.base_before != row.base_after;
    }
  }
  if (keeps_present_ && !evicts) return;
  call.staged_rows = std::max(call.capacity, call.past_capacity + call.tokens);
  const std::int64_t bytes = call.batch * attributes_.kv_heads * call.staged_rows *
                             attributes_.head_size *
                             static_cast<std::int64_t>(size_of(call.cache_type));
  call.staged_key = scratch.take<std::byte>(bytes);
  call.staged_value = scratch.take<std::byte>(bytes);
}

std::size_t FlowAttention::scratch_bytes(std::span<const Tensor> inputs) const {
  AttentionCall call = describe(inputs, {});
  Scratch scratch;
  take(scratch, call);
  return scratch.bytes();
}

KeyValueRows FlowAttention::cache_rows(const AttentionCall& call, std::int64_t batch,
                                       std::int64_t group) const {
  const std::int64_t head = batch * attributes_.kv_heads + group;
  const std::int64_t row_bytes =
      attributes_.head_size * static_cast<std::int64_t>(size_of(call.cache_type));
  const AttentionRow row = row_of(call, batch);
  if (staged(call)) {
    const std::int64_t offset = head * call.staged_rows * row_bytes;
    return {call.staged_key + offset, call.staged_value + offset, row.base_before};
  }
  const std::int64_t offset = head * call.capacity * row_bytes;
  return {call.outputs[kPresentKey].as<std::byte>() + offset,
          call.outputs[kPresentValue].as<std::byte>() + offset, row.base_after};
}

void FlowAttention::keep_past(const AttentionCall& call, std::int64_t batch,
                              std::int64_t group) const {
  const AttentionRow row = row_of(call, batch);
  const KeyValueRows to = cache_rows(call, batch, group);
  const std::int64_t row_bytes =
      attributes_.head_size * static_cast<std::int64_t>(size_of(call.cache_type));
  const std::int64_t bytes = (row.past - to.base) * row_bytes;
  if (bytes <= 0) return;
  // What earlier slices of the prompt left is in the present.
  const bool later = call.first_token > 0;
  const std::int64_t from =
      ((batch * attributes_.kv_heads + group) * (later ? call.capacity : call.past_capacity) +
       to.base - row.base_before) *
      row_bytes;
  const Tensor& past_key = later ? call.outputs[kPresentKey] : input(call, kPastKey);
  const Tensor& past_value = later ? call.outputs[kPresentValue] : input(call, kPastValue);
  const auto* key = past_key.as<const std::byte>() + from;
  const auto* value = past_value.as<const std::byte>() + from;
  // Past and present are the same memory with shared buffers: then nothing moves, or rows move to
  // the front.
  if (key != to.key) std::memmove(to.key, key, static_cast<std::size_t>(bytes));
  if (value != to.value) std::memmove(to.value, value, static_cast<std::size_t>(bytes));
}

void FlowAttention::prepare_head(const AttentionCall& call, float* head, AttentionInput norm,
                                 std::int64_t position) const {
  const std::int64_t d = attributes_.head_size;
  if (const Tensor& weight = input(call, norm); weight.present()) {
    context_.kernels.rms_norm(head, weight.as<const float>(), attributes_.norm_epsilon, head, d);
  }
  if (attributes_.rotary) {
    const Tensor& cos = input(call, kCosCache);
    // Tables of fewer than d / 2 angles rotate the front of the head only.
    const std::int64_t half = cos.shape[1];
    context_.kernels.rope(head, cos.as<const float>() + position * half,
                          input(call, kSinCache).as<const float>() + position * half, half,
                          attributes_.rotary_interleaved);
  }
}

std::int64_t FlowAttention::position_of(const AttentionCall& call, std::int64_t batch,
                                        std::int64_t token) const {
  if (const Tensor& ids = input(call, kPositionIds); ids.present()) {
    return ids.as<const std::int64_t>()[batch * call.tokens + token];
  }
  return row_of(call, batch).past + token;
}

void FlowAttention::prepare_queries(const AttentionCall& call, std::int64_t batch,
                                    std::int64_t group, std::int64_t token, float* out) const {
  const std::int64_t elements = attributes_.heads_per_group() * attributes_.head_size;
  const std::int64_t position = position_of(call, batch, token);
  std::copy_n(heads_of(call, attributes_, batch, token).query + group * elements, elements, out);
  for (std::int64_t i = 0; i < elements; i += attributes_.head_size)
    prepare_head(call, out + i, kQNormWeight, position);
  for (std::int64_t i = 0; i < elements; ++i) out[i] *= attributes_.scale;
}

void FlowAttention::append_token(const AttentionCall& call, std::int64_t batch,
                                 std::int64_t token) const {
  const std::int64_t d = attributes_.head_size;
  const AttentionRow row = row_of(call, batch);
  const TokenHeads from = heads_of(call, attributes_, batch, token);
  const std::int64_t position = position_of(call, batch, token);
  for (std::int64_t group = 0; group < attributes_.kv_heads; ++group) {
    alignas(64) float key[kMaxHeadSize];
    std::copy_n(from.key + group * d, d, key);
    prepare_head(call, key, kKNormWeight, position);
    const KeyValueRows rows = cache_rows(call, batch, group);
    const std::int64_t offset =
        (row.past + token - rows.base) * d * static_cast<std::int64_t>(size_of(call.cache_type));
    context_.kernels.store_cache(key, rows.key + offset, call.cache_type, d);
    context_.kernels.store_cache(from.value + group * d, rows.value + offset, call.cache_type, d);
  }
}

void FlowAttention::compact(const AttentionCall& call, std::int64_t batch,
                            std::int64_t group) const {
  const AttentionRow row = row_of(call, batch);
  const KeyValueRows from = cache_rows(call, batch, group);
  const std::int64_t row_bytes =
      attributes_.head_size * static_cast<std::int64_t>(size_of(call.cache_type));
  const std::int64_t skip = (row.base_after - row.base_before) * row_bytes;
  const auto bytes = static_cast<std::size_t>((row.past + row.tokens - row.base_after) * row_bytes);
  const std::int64_t to = (batch * attributes_.kv_heads + group) * call.capacity * row_bytes;
  std::memcpy(call.outputs[kPresentKey].as<std::byte>() + to, from.key + skip, bytes);
  std::memcpy(call.outputs[kPresentValue].as<std::byte>() + to, from.value + skip, bytes);
}

void FlowAttention::run(std::span<const Tensor> inputs, std::span<const Tensor> outputs,
                        std::span<std::byte> memory) const {
  AttentionCall call = describe(inputs, outputs);
  check(call);
  Scratch scratch(memory.data());
  take(scratch, call);

  context_.pool->run(call.batch * attributes_.kv_heads, [&](std::int64_t task) {
    keep_past(call, task / attributes_.kv_heads, task % attributes_.kv_heads);
  });
  context_.pool->run(call.batch * call.tokens, [&](std::int64_t task) {
    const std::int64_t batch = task / call.tokens;
    const std::int64_t token = task % call.tokens;
    if (token < row_of(call, batch).tokens) append_token(call, batch, token);
  });
  attend(call);
  if (staged(call) && keeps_present_) {
    context_.pool->run(call.batch * attributes_.kv_heads, [&](std::int64_t task) {
      compact(call, task / attributes_.kv_heads, task % attributes_.kv_heads);
    });
  }
}

namespace {

// FlowKVAttention: FlowQKVAttention for one token.
class FlowKVAttention final : public FlowAttention {
 public:
  using FlowAttention::FlowAttention;

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    FlowAttention::infer(inputs, outputs);
    if (inputs[kQuery].shape[1] != 1) {
      fail("[", attributes_.name, "] expected one token, got ", inputs[kQuery].shape[1],
           ": use FlowQKVAttention for several");
    }
  }
};

constexpr Operator kOperators[] = {
    {kDomain, "FlowQKVAttention",
     [](const Node& node, const Context& context) -> std::unique_ptr<Step> {
       return std::make_unique<FlowAttention>(node, context);
     }},
    {kDomain, "FlowKVAttention",
     [](const Node& node, const Context& context) -> std::unique_ptr<Step> {
       return std::make_unique<FlowKVAttention>(node, context);
     }},
};

}  // namespace

std::span<const Operator> attention_operators() { return kOperators; }

}  // namespace flownpu::cpu
