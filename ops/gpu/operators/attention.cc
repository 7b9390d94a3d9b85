// SPDX-License-Identifier: Apache-2.0
// FlowQKVAttention and FlowKVAttention: the host normalises, rotates and scales queries and appends
// to the cache, as on the CPU device; then the device computes attention.
#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ops/cpu/attention/step.h"
#include "ops/cpu/checked_step.h"
#include "ops/error.h"
#include "ops/gpu/kernels/kernels.h"
#include "ops/gpu/kernels/matrices/flow_attention.h"
#include "ops/gpu/operators/host_step.h"
#include "ops/gpu/operators/run.h"
#include "ops/gpu/operators/step.h"

namespace flownpu::gpu {
namespace {

using cpu::AttentionCall;
using cpu::AttentionRow;
using cpu::KeyValueRows;

constexpr std::string_view kOneToken = "FlowKVAttention";

class Attention final : public cpu::FlowQKVAttention {
 public:
  Attention(const Node& node, const StepArguments& arguments)
      : FlowQKVAttention(node, arguments.host_context),
        context_(arguments.context),
        one_token_(node.op_type == kOneToken),
        tokens_on_host_(arguments.tokens_on_host && node.input(kPastKey) != nullptr),
        has_mask_(node.input(kAttentionBias) != nullptr),
        has_sinks_(node.input(kHeadSink) != nullptr) {
    if (const std::string reason = refused_attention(node); !reason.empty())
      fail("[", attributes().name, "] ", reason, ": use device = cpu");
    const std::int64_t bytes = flow_attention_memory(shape_of(DataType::kFloat32));
    if (const std::int64_t most = context_->facts().local_memory; bytes > most)
      fail("[", attributes().name, "] expected heads that take at most ", most,
           " bytes of a work-group's memory on ", context_->facts().title(), ", got ", bytes,
           ": use device = cpu");
    const std::lock_guard lock(context_->mutex());
    in_matrices_ =
        ways_with_matrices(arguments.matrices, shape_of(DataType::kFloat32), *context_).front();
  }

  void infer(std::span<const Tensor> inputs, std::span<Shape> outputs) const override {
    FlowQKVAttention::infer(inputs, outputs);
    if (one_token_ && inputs[kQuery].shape[1] != 1)
      fail("[", attributes().name, "] expected one token, got ", inputs[kQuery].shape[1],
           ": use FlowQKVAttention for several");
  }
  // No slices: the device would treat each slice as a whole prompt.
  std::optional<Slicing> slicing(const Node& /*node*/) const override { return std::nullopt; }

 protected:
  void attend(const AttentionCall& call) const override {
    if (tokens_on_host_ && call.tokens == 1) return FlowQKVAttention::attend(call);
    AttentionShape shape = shape_of(call.cache_type);
    shape.in_tiles = call.tokens > 1;
    std::vector<std::int32_t> rows;
    std::int64_t capacity = 1;
    for (std::int64_t batch = 0; batch < call.batch; ++batch) {
      const AttentionRow row = row_of(call, batch);
      const std::int64_t base = cache_rows(call, batch, 0).base;
      for (const std::int64_t number : {row.past, row.tokens, base})
        rows.push_back(static_cast<std::int32_t>(number));
      capacity = std::max(capacity, row.past + row.tokens - base);
    }
    const std::vector<float> queries = queries_of(call);
    const std::vector<std::byte> keys = cache_of(call, capacity, &KeyValueRows::key);
    const std::vector<std::byte> values = cache_of(call, capacity, &KeyValueRows::value);
    Run run(*context_);
    const Buffer* y = run.output(queries.size() * sizeof(float));
    std::vector<const Buffer*> buffers{run.input(std::span<const float>(queries)),
                                       run.input(std::span<const std::byte>(keys)),
                                       run.input(std::span<const std::byte>(values)),
                                       run.input(std::span<const std::int32_t>(rows)), y};
    std::vector<std::int64_t> parameters{call.tokens, capacity, attributes().window};
    const auto add = [&](AttentionInput input) {
      const Tensor& tensor = call.input(input);
      buffers.push_back(run.input(
          std::span(tensor.as<const float>(), static_cast<std::size_t>(tensor.shape.elements()))));
    };
    if (has_mask_) {
      add(kAttentionBias);
      const Shape& mask = call.input(kAttentionBias).shape;
      for (int axis = 0; axis < mask.rank(); ++axis) parameters.push_back(mask[axis]);
    }
    if (has_sinks_) add(kHeadSink);
    if (in_matrices_ && shape.in_tiles) {
      const MatrixUnits& units = context_->facts().matrix_units();
      run.launch(flow_attention_of_matrices(shape, units),
                 flow_attention_of_matrices_grid(shape, units, call.batch, call.tokens), buffers,
                 parameters);
    } else {
      run.launch(flow_attention(shape), flow_attention_grid(shape, call.batch, call.tokens),
                 buffers, parameters);
    }
    run.read(y, {reinterpret_cast<std::byte*>(output_row(call, 0, 0, 0)),
                 queries.size() * sizeof(float)});
  }

 private:
  AttentionShape shape_of(DataType type) const {
    if (type == DataType::kInt8 && attributes().head_size % 2 != 0)
      fail("[", attributes().name,
           "] expected heads of an even size in an int8 KV cache on device ", "'gpu', got ",
           attributes().head_size, ": use device = cpu");
    return {.heads = attributes().heads,
            .kv_heads = attributes().kv_heads,
            .head_size = attributes().head_size,
            .cache = element_of_cache(type),
            .softcap = attributes().softcap,
            .causal = attributes().causal,
            .has_mask = has_mask_,
            .has_sinks = has_sinks_,
            .lanes = attention_lanes(context_->facts())};
  }

  std::vector<float> queries_of(const AttentionCall& call) const {
    const std::int64_t of_group = attributes().heads_per_group() * attributes().head_size;
    const std::int64_t width = of_group * attributes().kv_heads;
    std::vector<float> queries(static_cast<std::size_t>(call.batch * call.tokens * width));
    for (std::int64_t batch = 0; batch < call.batch; ++batch) {
      const std::int64_t tokens = row_of(call, batch).tokens;
      for (std::int64_t token = 0; token < tokens; ++token) {
        float* row = queries.data() + (batch * call.tokens + token) * width;
        for (std::int64_t group = 0; group < attributes().kv_heads; ++group)
          prepare_queries(call, batch, group, token, row + group * of_group);
      }
    }
    return queries;
  }

  // Keys or values [batch, kv_heads, capacity, head_size], each row of the batch from its cache's
  // first position on.
  std::vector<std::byte> cache_of(const AttentionCall& call, std::int64_t capacity,
                                  std::byte* KeyValueRows::* part) const {
    const std::int64_t heads = attributes().kv_heads;
    std::vector<std::byte> cache(
        static_cast<std::size_t>(call.batch * heads * capacity * call.row_bytes));
    for (std::int64_t batch = 0; batch < call.batch; ++batch) {
      const AttentionRow row = row_of(call, batch);
      for (std::int64_t group = 0; group < heads; ++group) {
        const KeyValueRows from = cache_rows(call, batch, group);
        const std::int64_t count = row.past + row.tokens - from.base;
        if (count > 0)
          std::memcpy(cache.data() + (batch * heads + group) * capacity * call.row_bytes,
                      from.*part, static_cast<std::size_t>(count * call.row_bytes));
      }
    }
    return cache;
  }

  std::shared_ptr<Context> context_;
  bool one_token_;
  bool tokens_on_host_;
  bool has_mask_;
  bool has_sinks_;
  bool in_matrices_ = false;  // several tokens
};

}  // namespace

std::string refused_attention(const Node& node) {
  if (node.input(kBidirectionalBlocks) != nullptr)
    return "expected no bidirectional_blocks on device 'gpu', whose operator has none";
  return "";
}

std::unique_ptr<Step> make_attention(const Node& node, StepArguments arguments) {
  // Queries, keys and values are prepared in the host's memory.
  return std::make_unique<HostStep>(
      node, arguments.context,
      std::make_unique<cpu::CheckedStep>(
          node.op_type == kOneToken ? kFlowKVAttention : kFlowQKVAttention, to_string(node),
          std::make_unique<Attention>(node, arguments)));
}

}  // namespace flownpu::gpu
