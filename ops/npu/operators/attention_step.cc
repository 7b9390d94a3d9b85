// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "ops/cpu/attention/step.h"
#include "ops/cpu/checked_step.h"
#include "ops/error.h"
#include "ops/npu/nodes/lowered_node.h"
#include "ops/npu/operators/steps.h"
#include "ops/npu/run/cache_memory.h"
#include "ops/transformer/graph/operators.h"

namespace flownpu::npu {
namespace {

using cpu::AttentionCall;
using cpu::AttentionRow;

// A bias up to this hides its key: e^-10000 is 0 in float32, whatever the scores are. Exported
// models have -10000, the least float32, or infinity.
constexpr float kHidden = -1e4F;

constexpr std::string_view kOneToken = "FlowKVAttention";
constexpr std::string_view kSeveralTokens = "FlowQKVAttention";

// The element of ArrayOperator::sizes that has the programs.
enum Kind : std::uint8_t { kAsNode, kCausalOfMasked };

// Neighbouring queries that all see the same keys or, if `causal`, each one key more than the query
// before.
struct Span {
  Kind kind = kAsNode;
  bool causal = false;
  std::int64_t first = 0;
  std::int64_t count = 0;
  // Positions of the keys, in order; with a causal mask the first query sees `past` + 1 of them.
  std::vector<std::int64_t> keys;
  std::int64_t past = 0;
  std::vector<ProgramPart> parts = {};
};

std::vector<std::int64_t> positions(std::int64_t begin, std::int64_t end) {
  std::vector<std::int64_t> all(static_cast<std::size_t>(std::max<std::int64_t>(end - begin, 0)));
  std::iota(all.begin(), all.end(), begin);
  return all;
}

// The keys that a row of the bias lets a query see; nullopt if the bias changes a score.
std::optional<std::vector<std::int64_t>> seen_by_bias(const float* bias, std::int64_t total) {
  std::vector<std::int64_t> seen;
  for (std::int64_t key = 0; key < total; ++key) {
    if (bias[key] == 0.0F)
      seen.push_back(key);
    else if (!(bias[key] <= kHidden))
      return std::nullopt;
  }
  return seen;
}

class AttentionStep final : public cpu::FlowQKVAttention {
 public:
  AttentionStep(const Node& node, std::unique_ptr<OperatorPrograms> programs,
                const cpu::Context& context)
      : FlowQKVAttention(node, context),
        programs_(std::move(programs)),
        one_token_(node.op_type == kOneToken) {}

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    FlowQKVAttention::infer(inputs, outputs);
    if (one_token_ && inputs[kQuery].shape[1] != 1)
      fail("[", attributes().name, "] expected one token, got ", inputs[kQuery].shape[1],
           ": use FlowQKVAttention for several");
  }
  std::optional<Slicing> slicing(const Node& node) const override {
    return FlowQKVAttention::slicing(operator_of_graph(node));
  }

 protected:
  void attend(const AttentionCall& call) const override {
    std::vector<std::vector<Span>> rows;
    std::int64_t dispatches = 0;
    std::int64_t pairs = 0;
    for (std::int64_t batch = 0; batch < call.batch; ++batch) {
      std::optional<std::vector<Span>> spans = spans_of(call, batch);
      if (!spans) return FlowQKVAttention::attend(call);
      for (Span& span : *spans) {
        if (!find_parts(span)) return FlowQKVAttention::attend(call);
        dispatches += dispatches_of(span.parts);
        pairs += span.count * static_cast<std::int64_t>(span.keys.size());
      }
      rows.push_back(*std::move(spans));
    }
    if (!programs_->is_worth(pairs * programs_->description().multiply_adds, dispatches))
      return FlowQKVAttention::attend(call);
    const std::unique_lock lock = programs_->begin();
    for (std::int64_t batch = 0; batch < call.batch; ++batch) {
      // Queries that are padding on the right see nothing: zeros.
      std::fill_n(output_row(call, batch, 0, 0), call.tokens * width(), 0.0F);
      for (const Span& span : rows[static_cast<std::size_t>(batch)]) {
        write_keys(call, batch, span);
        attend_span(call, batch, span);
      }
    }
  }

 private:
  std::int64_t width() const { return attributes().heads * attributes().head_size; }

  // The spans of a row of the batch; nullopt if the array does not support the mask.
  std::optional<std::vector<Span>> spans_of(const AttentionCall& call, std::int64_t batch) const {
    const AttentionRow row = row_of(call, batch);
    if (row.tokens <= 0) return std::vector<Span>{};
    const std::int64_t base = cache_rows(call, batch, 0).base;
    const std::int64_t total = row.past + row.tokens;
    if (const Tensor& bias = call.input(kAttentionBias); bias.present())
      return spans_of_mask(call, batch, row, bias);
    return std::vector<Span>{{.causal = attributes().causal,
                              .count = row.tokens,
                              .keys = positions(base, total),
                              .past = attributes().causal ? row.past - base : 0}};
  }

  // Two kinds of masks are supported. In one all queries see the same keys. The other is causal;
  // its last keys may be hidden (padding on the right), and their queries see all keys that are not
  // hidden.
  std::optional<std::vector<Span>> spans_of_mask(const AttentionCall& call, std::int64_t batch,
                                                 const AttentionRow& row,
                                                 const Tensor& bias) const {
    const std::int64_t total = row.past + row.tokens;
    if (bias.shape[1] != 1 || bias.shape[3] < total) return std::nullopt;
    const auto bias_of = [&](std::int64_t token) {
      const std::int64_t b = bias.shape[0] == 1 ? 0 : batch;
      return bias.as<const float>() +
             (b * bias.shape[2] + call.first_token + token) * bias.shape[3];
    };
    const auto last = seen_by_bias(bias_of(row.tokens - 1), total);
    if (!last || last->empty()) return std::nullopt;
    const auto keys = static_cast<std::int64_t>(last->size());
    const bool is_prefix = last->back() == keys - 1;
    bool same = true;
    bool causal = is_prefix && keys > row.past;
    for (std::int64_t token = 0; token < row.tokens && (same || causal); ++token) {
      const auto seen = seen_by_bias(bias_of(token), total);
      if (!seen) return std::nullopt;
      same = same && *seen == *last;
      causal = causal && *seen == positions(0, std::min(keys, row.past + token + 1));
    }
    if (same) return std::vector<Span>{{.count = row.tokens, .keys = *last}};
    if (!causal) return std::nullopt;
    const std::int64_t before_padding = keys - row.past;
    std::vector<Span> spans{{.kind = kCausalOfMasked,
                             .causal = true,
                             .count = before_padding,
                             .keys = *last,
                             .past = row.past}};
    if (before_padding < row.tokens) {
      spans.push_back(
          {.first = before_padding, .count = row.tokens - before_padding, .keys = *last});
    }
    return spans;
  }

  // Chooses the span's programs; false if there are none for it.
  bool find_parts(Span& span) const {
    span.parts = parts_of(programs_->records(span.kind), span.count,
                          span.causal ? std::optional(span.past) : std::nullopt);
    const auto keys = static_cast<std::int64_t>(span.keys.size());
    return !span.parts.empty() && std::ranges::all_of(span.parts, [&](const ProgramPart& part) {
      return keys <= part.program->context;
    });
  }

  // Writes the span's keys and values one after the other, in the layout of the programs, and zeros
  // behind the last.
  void write_keys(const AttentionCall& call, std::int64_t batch, const Span& span) const {
    const CacheLayout& layout = span.parts.front().program->cache;
    Buffer& cache = *programs_->cache();
    const std::size_t keys = span.keys.size() * layout.position;
    const std::size_t end =
        with_zeros(span.keys.size(), cache.bytes().size() / layout.position) * layout.position;
    const std::int64_t d = attributes().head_size;
    for (std::int64_t group = 0; group < attributes().kv_heads; ++group) {
      const cpu::KeyValueRows rows = cache_rows(call, batch, group);
      std::byte* to = cache.bytes().data() + static_cast<std::size_t>(group) * layout.head;
      for (const std::int64_t key : span.keys) {
        const std::int64_t from = (key - rows.base) * call.row_bytes;
        read_row(rows.key + from, call.cache_type, to, d);
        read_row(rows.value + from, call.cache_type, to + layout.value, d);
        to += layout.position;
      }
    }
    std::memset(cache.bytes().data() + keys, 0, end - keys);
    cache.to_device(0, end);
  }

  void attend_span(const AttentionCall& call, std::int64_t batch, const Span& span) const {
    const std::int64_t of_group = attributes().heads_per_group() * attributes().head_size;
    std::vector<float> queries;
    for (const auto& [program, first, count] : span.parts) {
      queries.resize(static_cast<std::size_t>(count * width()));
      for (std::int64_t query = 0; query < count; ++query) {
        for (std::int64_t group = 0; group < attributes().kv_heads; ++group) {
          prepare_queries(call, batch, group, span.first + first + query,
                          queries.data() + query * width() + group * of_group);
        }
      }
      // Without a causal mask the position is that of the last key.
      programs_->run(
          program, queries, {output_row(call, batch, span.first + first, 0), queries.size()},
          span.causal ? span.past + first : static_cast<std::int64_t>(span.keys.size()) - 1);
    }
  }

  std::unique_ptr<OperatorPrograms> programs_;
  bool one_token_;
};

}  // namespace

std::unique_ptr<Step> make_attention_step(const Node& node,
                                          std::unique_ptr<OperatorPrograms> programs,
                                          const cpu::Context& context) {
  const Node of_graph = operator_of_graph(node);
  return std::make_unique<cpu::CheckedStep>(
      of_graph.op_type == kOneToken ? kFlowKVAttention : kFlowQKVAttention, to_string(of_graph),
      std::make_unique<AttentionStep>(of_graph, std::move(programs), context));
}

}  // namespace flownpu::npu
