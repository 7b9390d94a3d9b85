// SPDX-License-Identifier: Apache-2.0
// A work-group has some columns of a head's state, and a lane a few rows of one column, in
// registers from the first token to the last: a launch reads and writes each state once, however
// many tokens it has. The lanes of a column add up its sums in the work-group's memory, in turn in
// one of two places, so that a token has one barrier.
//
// Queries and keys of a tile of tokens lie in the work-group's memory, in lines longer by one,
// since lanes that each read another line would else read one bank. The rule is expanded so that
// one pass over the column gives both of its sums, with S the state before the token:
//   d = share (v - e^decay S^T k);  y = scale (e^decay S^T q + (k . q) d)
//
// For single tokens and candidates; prompts go in chunks (delta_chunks.cc) unless a head's state is
// too large for a work-group's memory.
#include <algorithm>

#include "ops/gpu/kernels/pieces.h"
#include "ops/gpu/kernels/states/delta_tensors.h"

namespace flownpu::gpu {
namespace {

constexpr std::int64_t kLanes = 64;  // of the rates
// The lanes that share a column: few enough for work-groups of 256, which every GPU takes.
constexpr std::int64_t kMostShares = 8;
constexpr std::int64_t kRows = 16;
// Tokens whose queries and keys are in a work-group's memory: 16.5 KB for heads of 128 elements, of
// the 32 that OpenCL 1.2 requires.
constexpr std::int64_t kTile = 16;

std::int64_t shares_of(const DeltaShape& shape) {
  return std::min(kMostShares, q4nx::ceil_div(shape.key_size, kRows));
}

constexpr const char* kBody = R"(
  const int head = group(0);
  const int of_group = lane() % args.columns;
  const int share = lane() / args.columns;
  const int column = group(1) * args.columns + of_group;
  const int own = min(column, args.value_size - 1);
  const int sequence = group(2);
  const int first_row = args.first + sequence * args.tokens;
  const int front = head / args.shared_by * args.key_size;
  const int value_front = args.front_of_values + head * args.value_size;
  shared float lines[args.held];
  shared float products[3 * args.tile];
  shared float of_keys[2 * args.lanes];
  shared float of_queries[2 * args.lanes];
  float state[args.rows];
  unrolled for (int i = 0; i < args.rows; ++i)
    state[i] = args.before.Read(sequence, head, min(share * args.rows + i, args.key_size - 1), own);
  for (int start = 0; start < args.tokens; start += args.tile) {
    const int some = min(args.tile, args.tokens - start);
    for (int i = lane(); i < some * 2 * args.all_rows; i += args.lanes) {
      const int line = i / args.all_rows;
      const int element = i % args.all_rows;
      const int token = first_row + start + line / 2;
      float value = 0.0f;
      if (element < args.key_size) {
        if (line % 2 == 0) {
          value = args.query.Read(token, front + element);
        } else {
          value = args.key.Read(token, args.front_of_keys + front + element);
        }
      }
      lines[line * args.line + element] = value;
    }
    synchronise();
    for (int i = lane(); i < 3 * some; i += args.lanes) {
      const int left = (2 * (i / 3) + (i % 3 == 1 ? 1 : 0)) * args.line;
      const int right = (2 * (i / 3) + (i % 3 == 0 ? 0 : 1)) * args.line;
      float product = 0.0f;
      for (int k = 0; k < args.key_size; ++k) product += lines[left + k] * lines[right + k];
      products[i] = product;
    }
    synchronise();
    for (int token = 0; token < some; ++token) {
      const int row = first_row + start + token;
      const int query_line = 2 * token * args.line + share * args.rows;
      const int key_line = query_line + args.line;
      float of_key = 0.0f;
      float of_query = 0.0f;
      unrolled for (int i = 0; i < args.rows; ++i) {
        of_key += lines[key_line + i] * state[i];
        of_query += lines[query_line + i] * state[i];
      }
      const int turn = token % 2 * args.lanes;
      of_keys[turn + lane()] = of_key;
      of_queries[turn + lane()] = of_query;
      synchronise();
      of_key = 0.0f;
      of_query = 0.0f;
      for (int other = 0; other < args.shares; ++other) {
        of_key += of_keys[turn + other * args.columns + of_group];
        of_query += of_queries[turn + other * args.columns + of_group];
      }
      float query_unit = args.scale;
      float key_unit = 1.0f;
      if (args.is_packed == 1) {
        const float query_square = products[3 * token];
        const float key_square = products[3 * token + 1];
        query_unit = query_square > 0.0f ? args.scale / sqrt(query_square) : 0.0f;
        key_unit = key_square > 0.0f ? 1.0f / sqrt(key_square) : 0.0f;
      }
      const float decay = exp(args.decay.Read(row, head));
      const float error = args.value.Read(row, value_front + own) - decay * key_unit * of_key;
      const float taken = key_unit * args.share.Read(row, head) * error;
      unrolled for (int i = 0; i < args.rows; ++i)
        state[i] = decay * state[i] + lines[key_line + i] * taken;
      if (share == 0 && column < args.value_size) {
        const float y = decay * of_query + products[3 * token + 2] * taken;
        args.y.Write(y * query_unit, row, head * args.value_size + column);
      }
    }
    synchronise();
  }
  if (column < args.value_size) {
    unrolled for (int i = 0; i < args.rows; ++i) {
      const int key = share * args.rows + i;
      if (key < args.key_size) args.behind.Write(state[i], sequence, head, key, column);
    }
  }
)";

constexpr const char* kRates = R"(
  const int head = group(0);
  const int row = args.first + group(1);
  shared float sums[args.lanes];
  shared float sixteenths[16];
  float sum = 0.0f;
  for (int k = lane(); k < args.columns; k += args.lanes)
    sum += args.x.Read(row, k) * args.a.Read(k, head);
  SUM
  const float x = sum + args.bias.Read(head);
  sum = 0.0f;
  for (int k = lane(); k < args.columns; k += args.lanes)
    sum += args.x.Read(row, k) * args.c.Read(k, head);
  SUM
  if (lane() == 0) {
    const float softplus = fmax(x, 0.0f) + log(1.0f + exp(-fabs(x)));
    args.decay.Write(args.scale.Read(head) * softplus, row, head);
    args.share.Write(1.0f / (1.0f + exp(-sum)), row, head);
  }
)";

}  // namespace

TensorDescription given(const DeltaShape& shape, std::string_view name) {
  const std::int64_t keys = shape.key_heads * shape.key_size;
  const std::int64_t values = shape.value_heads * shape.value_size;
  const std::int64_t own = name == "value" ? values : keys;
  return {.name = std::string(name),
          .element = Element::kActivation,
          .sizes = {std::string("all_tokens"), shape.is_packed ? 2 * keys + values : own}};
}

TensorDescription rates_of(const DeltaShape& shape, const char* name) {
  return {.name = name, .sizes = {std::string("all_tokens"), shape.value_heads}};
}

TensorDescription state_of(const DeltaShape& shape, const char* name, Access access) {
  return {.name = name,
          .access = access,
          .sizes = {std::string("sequences"), shape.value_heads, shape.key_size, shape.value_size}};
}

TensorDescription result_of(const DeltaShape& shape) {
  return {.name = "y",
          .element = Element::kActivation,
          .access = Access::kWrite,
          .sizes = {std::string("all_tokens"), shape.value_heads * shape.value_size}};
}

Constants constants_of(const DeltaShape& shape) {
  const std::int64_t keys = shape.key_heads * shape.key_size;
  return {{"shared_by", shape.value_heads / shape.key_heads},
          {"front_of_keys", shape.is_packed ? keys : 0},
          {"front_of_values", shape.is_packed ? 2 * keys : 0},
          {"is_packed", std::int64_t{shape.is_packed ? 1 : 0}},
          {"key_size", shape.key_size},
          {"value_size", shape.value_size},
          {"columns", kDeltaColumns},
          {"scale", shape.scale}};
}

KernelDescription gated_delta(const DeltaShape& shape) {
  const std::int64_t shares = shares_of(shape);
  const std::int64_t rows = q4nx::ceil_div(shape.key_size, shares);
  const std::int64_t line = shares * rows + 1;
  KernelDescription kernel{
      .name = "gated_delta",
      .body = kBody,
      .tensors = {given(shape, "query"), given(shape, "key"), given(shape, "value"),
                  rates_of(shape, "decay"), rates_of(shape, "share"),
                  state_of(shape, "before", Access::kRead), result_of(shape),
                  state_of(shape, "behind", Access::kWrite)},
      .constants = constants_of(shape),
      .parameters = {"first", "tokens"},
      .lanes = kDeltaColumns * shares};
  kernel.constants.insert({{"shares", shares},
                           {"rows", rows},
                           {"all_rows", shares * rows},
                           {"tile", kTile},
                           {"line", line},
                           {"held", 2 * kTile * line}});
  return kernel;
}

Grid gated_delta_grid(const DeltaShape& shape, std::int64_t sequences) {
  return {.groups = {shape.value_heads, q4nx::ceil_div(shape.value_size, kDeltaColumns), sequences},
          .lanes = kDeltaColumns * shares_of(shape)};
}

KernelDescription delta_rates(std::int64_t heads, std::int64_t columns) {
  const std::string tokens = "all_tokens";
  return {.name = "delta_rates",
          .body = replaced(kRates, "SUM", over_lanes()),
          .tensors = {{.name = "x", .element = Element::kActivation, .sizes = {tokens, columns}},
                      {.name = "a", .sizes = {columns, heads}},
                      {.name = "c", .sizes = {columns, heads}},
                      {.name = "bias", .sizes = {heads}},
                      {.name = "scale", .sizes = {heads}},
                      {.name = "decay", .access = Access::kWrite, .sizes = {tokens, heads}},
                      {.name = "share", .access = Access::kWrite, .sizes = {tokens, heads}}},
          .constants = {{"columns", columns}},
          .parameters = {"first"},
          .lanes = kLanes};
}

Grid delta_rates_grid(std::int64_t heads, std::int64_t tokens) {
  return {.groups = {heads, tokens, 1}, .lanes = kLanes};
}

}  // namespace flownpu::gpu
