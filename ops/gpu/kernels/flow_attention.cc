// SPDX-License-Identifier: Apache-2.0
// FlowKV and FlowQKV (Gemma3 paper, sections 3.1.2 and 3.1.3): the heads that share a KV head sweep
// its keys in chunks of as many as there are lanes, with an online softmax (equations 6 to 12). A
// lane has one key of a chunk for the scores, and then every 64th element of the values' sums.
#include <utility>

#include "ops/gpu/kernels/kernels.h"

namespace flownpu::gpu {
namespace {

constexpr std::int64_t kLanes = 64;

constexpr const char* kBody = R"(
  const int kv = group(0);
  const int token = group(1);
  LENGTHS
  const int front = kv * args.per_group * args.head_size;
  shared float query[args.per_group * args.head_size];
  shared float weights[args.per_group * args.lanes];
  for (int i = lane(); i < args.per_group * args.head_size; i += args.lanes)
    query[i] = args.query_heads.Read(batch, row, front + i);
  float sums[args.per_group][args.each];
  float maximum[args.per_group];
  float denominator[args.per_group];
  for (int h = 0; h < args.per_group; ++h) {
    maximum[h] = -INFINITY;
    denominator[h] = 0.0f;
    for (int j = 0; j < args.each; ++j) sums[h][j] = 0.0f;
  }
  synchronise();
  int begin = base;
  int end = past + SEEN;
  if (args.window > 0) begin = max(begin, past + token + 1 - args.window);
  if (token >= valid) end = begin;
  PART
  for (int start = begin; start < end; start += args.lanes) {
    const int keys = min(args.lanes, end - start);
    float scores[args.per_group];
    for (int h = 0; h < args.per_group; ++h) scores[h] = 0.0f;
    if (lane() < keys) {
      for (int i = 0; i < args.head_size; ++i) {
        const float key = args.key.Read(batch, kv, start + lane() - base, i);
        for (int h = 0; h < args.per_group; ++h) scores[h] += query[h * args.head_size + i] * key;
      }
    }
    for (int h = 0; h < args.per_group; ++h) {
      if (args.softcap > 0.0f) scores[h] = args.softcap * tanh(scores[h] / args.softcap);
      weights[h * args.lanes + lane()] = scores[h];
    }
    synchronise();
    float rescale[args.per_group];
    for (int h = 0; h < args.per_group; ++h) {
      float larger = maximum[h];
      for (int l = 0; l < keys; ++l) larger = fmax(larger, weights[h * args.lanes + l]);
      rescale[h] = exp(maximum[h] - larger);
      maximum[h] = larger;
    }
    synchronise();
    for (int h = 0; h < args.per_group; ++h)
      weights[h * args.lanes + lane()] = exp(scores[h] - maximum[h]);
    synchronise();
    for (int h = 0; h < args.per_group; ++h) {
      denominator[h] *= rescale[h];
      for (int l = 0; l < keys; ++l) denominator[h] += weights[h * args.lanes + l];
      for (int j = 0; j < args.each; ++j) sums[h][j] *= rescale[h];
    }
    for (int j = 0; j < args.each; ++j) {
      const int i = lane() + j * args.lanes;
      if (i < args.head_size) {
        for (int l = 0; l < keys; ++l) {
          const float value = args.value_rows.Read(batch, kv, start + l - base, i);
          for (int h = 0; h < args.per_group; ++h)
            sums[h][j] += weights[h * args.lanes + l] * value;
        }
      }
    }
    synchronise();
  }
  for (int h = 0; h < args.per_group; ++h) {
    for (int j = 0; j < args.each; ++j) {
      const int i = lane() + j * args.lanes;
      if (i < args.head_size) {
        RESULT
      }
    }
    STATE
  }
)";

constexpr const char* kMean = R"(
        const float mean = begin < end ? sums[h][j] / denominator[h] : 0.0f;
        args.y.Write(mean, batch, row, front + h * args.head_size + i);
)";
// A work-group has a part of the keys, of which it leaves the softmax's state behind.
constexpr const char* kPart = R"(
  const int part = group(2);
  const int share = (end - begin + args.parts - 1) / args.parts;
  begin += part * share;
  end = min(end, begin + share);
)";
constexpr const char* kSum = R"(
        args.y.Write(sums[h][j], part, front + h * args.head_size + i);
)";
constexpr const char* kState = R"(
    if (lane() == 0) {
      args.states.Write(maximum[h], part, kv * args.per_group + h, 0);
      args.states.Write(denominator[h], part, kv * args.per_group + h, 1);
    }
)";

// A part without keys has a denominator of zero and a maximum of -INFINITY, which weighs nothing.
constexpr const char* kMergeBody = R"(
  const int head = group(0);
  float maximum = -INFINITY;
  for (int part = 0; part < args.parts; ++part)
    maximum = fmax(maximum, args.states.Read(part, head, 0));
  float denominator = 0.0f;
  for (int part = 0; part < args.parts; ++part)
    denominator += exp(args.states.Read(part, head, 0) - maximum) * args.states.Read(part, head, 1);
  for (int i = lane(); i < args.head_size; i += args.lanes) {
    float sum = 0.0f;
    for (int part = 0; part < args.parts; ++part)
      sum += exp(args.states.Read(part, head, 0) - maximum) *
             args.sums.Read(part, head * args.head_size + i);
    args.y.Write(sum / denominator, args.first, head * args.head_size + i);
  }
)";

constexpr const char* kLengthsOfBatch = R"(
  const int batch = group(2);
  const int past = args.rows.Read(batch, 0);
  const int valid = args.rows.Read(batch, 1);
  const int base = args.rows.Read(batch, 2);
  const int row = token;
)";
constexpr const char* kLengthsOfSequence = R"(
  const int batch = 0;
  const int past = args.before;
  const int valid = args.tokens;
  const int base = 0;
  const int row = args.first + token;
)";

TensorDescription states_of(const AttentionShape& shape, Access access) {
  return {.name = "states",
          .access = access,
          .sizes = {std::string("parts"), shape.heads, std::int64_t{2}}};
}

}  // namespace

KernelDescription flow_attention(const AttentionShape& shape) {
  const std::string batch = "batches";
  const std::string tokens = "tokens";
  const std::vector<Size> cache{batch, shape.kv_heads, std::string("capacity"), shape.head_size};
  const std::vector<Size> heads{batch, tokens, shape.heads * shape.head_size};
  std::string body = kBody;
  const std::string seen =
      shape.has_blocks ? "args.ends.Read(row)" : "(args.causal ? token + 1 : valid)";
  for (const auto& [word, by] :
       {std::pair<std::string, std::string>(
            "LENGTHS", shape.one_sequence ? kLengthsOfSequence : kLengthsOfBatch),
        {"SEEN", seen},
        {"PART", shape.has_parts ? kPart : ""},
        {"RESULT", shape.has_parts ? kSum : kMean},
        {"STATE", shape.has_parts ? kState : ""}})
    body.replace(body.find(word), word.size(), by);
  std::vector<TensorDescription> tensors{
      {.name = "query_heads", .element = Element::kActivation, .sizes = heads},
      {.name = "key", .element = shape.cache, .sizes = cache},
      {.name = "value_rows", .element = shape.cache, .sizes = cache}};
  if (!shape.one_sequence)
    tensors.push_back({.name = "rows", .element = Element::kInt32, .sizes = {batch, 3}});
  if (shape.has_blocks)
    tensors.push_back({.name = "ends", .element = Element::kInt32, .sizes = {tokens}});
  std::vector<std::string> parameters{tokens, "capacity"};
  if (shape.one_sequence) parameters.insert(parameters.begin(), {"first", "before"});
  if (shape.has_parts) {
    tensors.push_back({.name = "y",
                       .access = Access::kWrite,
                       .sizes = {std::string("parts"), shape.heads * shape.head_size}});
    tensors.push_back(states_of(shape, Access::kWrite));
    parameters.push_back("parts");
  } else {
    tensors.push_back(
        {.name = "y", .element = Element::kActivation, .access = Access::kWrite, .sizes = heads});
  }
  return {.name = "flow_attention",
          .body = body,
          .tensors = std::move(tensors),
          .constants = {{"per_group", shape.heads_per_group()},
                        {"head_size", shape.head_size},
                        {"each", q4nx::ceil_div(shape.head_size, kLanes)},
                        {"softcap", shape.softcap},
                        {"window", shape.window},
                        {"causal", std::int64_t{shape.causal ? 1 : 0}}},
          .parameters = std::move(parameters),
          .lanes = kLanes};
}

KernelDescription merge_attention(const AttentionShape& shape) {
  const std::int64_t width = shape.heads * shape.head_size;
  return {.name = "merge_attention",
          .body = kMergeBody,
          .tensors = {{.name = "sums", .sizes = {std::string("parts"), width}},
                      states_of(shape, Access::kRead),
                      {.name = "y",
                       .element = Element::kActivation,
                       .access = Access::kWrite,
                       .sizes = {std::string("tokens"), width}}},
          .constants = {{"head_size", shape.head_size}},
          .parameters = {"first", "parts"},
          .lanes = kLanes};
}

Grid merge_attention_grid(const AttentionShape& shape) {
  return {.groups = {shape.heads, 1, 1}, .lanes = kLanes};
}

Grid flow_attention_grid(const AttentionShape& shape, std::int64_t batch, std::int64_t tokens) {
  return {.groups = {shape.kv_heads, tokens, batch}, .lanes = kLanes};
}

std::int64_t flow_attention_memory(const AttentionShape& shape) {
  return shape.heads_per_group() * (shape.head_size + kLanes) *
         static_cast<std::int64_t>(sizeof(float));
}

}  // namespace flownpu::gpu
