// SPDX-License-Identifier: Apache-2.0
// QK-norm, rotation and append in one kernel, as ML Drift fuses them. A work-group has one head of
// one token, a lane every 64th element of it. In an int8 cache each row is codes with one scale
// (ops/definitions/int8_cache.py), so that the head's largest magnitude has to be found first.
#include <limits>

#include "ops/gpu/kernels/kernels.h"

namespace flownpu::gpu {
namespace {

constexpr std::int64_t kLanes = 64;

// NORM sets `inverse`; WEIGHTED(i) is element i of the head, normalised. KEEP writes `element` i of
// a key or value to the cache. For int8 rows KEEP only keeps the element, and STORE writes the row
// when all elements are known; KEEPING declares the memory for that.
constexpr const char* kBody = R"(
  const int head = group(0);
  const int row = args.first + group(1);
  const int position = args.past + group(1);
  const int front = head * args.head_size;
  const int is_key = head < args.heads + args.kv_heads;
  const int kv = head - args.heads - (is_key ? 0 : args.kv_heads);
  NORM
  KEEPING
  for (int i = lane(); i < args.head_size; i += args.lanes) {
    float element;
    if (is_key) {
      const int pair = i % args.half;
      const int other = i < args.half ? i + args.half : i - args.half;
      const float turned = WEIGHTED(other) * args.sin.Read(position, pair);
      element = WEIGHTED(i) * args.cos.Read(position, pair) + (i < args.half ? -turned : turned);
    } else {
      element = args.packed.Read(row, front + i);
    }
    if (head < args.heads) {
      args.query.Write(element * args.scale, row, front + i);
    } else {
      KEEP
    }
  }
  STORE
)";

constexpr const char* kKeepFloat = R"(
      if (is_key) {
        args.key.Write(element, kv, position, i);
      } else {
        args.value_rows.Write(element, kv, position, i);
      }
)";

constexpr const char* kKeepingRow = R"(
  shared float magnitudes[args.lanes];
  float kept[args.each];
  float largest = 0.0f;
)";
// Once the largest is NaN, it stays NaN.
constexpr const char* kKeepRow = R"(
      kept[i / args.lanes] = element;
      const float magnitude = fabs(element);
      largest = isnan(largest) || magnitude <= largest ? largest : magnitude;
)";
// A scale that is not finite becomes NaN, and one that is not a normal number becomes 0. All lanes
// of a work-group have the same head, so they take the same branch, with its barriers.
constexpr const char* kStoreRow = R"(
  if (head >= args.heads) {
    magnitudes[lane()] = largest;
    synchronise();
    for (int step = args.lanes / 2; step > 0; step /= 2) {
      if (lane() < step) {
        const float mine = magnitudes[lane()];
        const float other = magnitudes[lane() + step];
        magnitudes[lane()] = isnan(mine) || other <= mine ? mine : other;
      }
      synchronise();
    }
    float row_scale = from_bfloat16(to_bfloat16(magnitudes[0] / 127.0f));
    if (!isfinite(row_scale)) row_scale = NAN;
    if (row_scale < args.smallest) row_scale = 0.0f;
    for (int i = lane(); i < args.head_size; i += args.lanes) {
      const int code = row_scale > 0.0f ? convert_int_rte(kept[i / args.lanes] / row_scale) : 0;
      if (is_key) {
        args.key.Write(code, kv, position, i);
      } else {
        args.value_rows.Write(code, kv, position, i);
      }
    }
    if (lane() == 0) {
      if (is_key) {
        args.key.WriteScale(row_scale, kv, position);
      } else {
        args.value_rows.WriteScale(row_scale, kv, position);
      }
    }
  }
)";

constexpr const char* kNorm = R"(
  shared float squares[args.lanes];
  float square = 0.0f;
  for (int i = lane(); i < args.head_size; i += args.lanes) {
    const float x = args.packed.Read(row, front + i);
    square += x * x;
  }
  squares[lane()] = square;
  synchronise();
  for (int step = args.lanes / 2; step > 0; step /= 2) {
    if (lane() < step) squares[lane()] += squares[lane() + step];
    synchronise();
  }
  const float inverse = 1.0f / sqrt(squares[0] / (float)args.head_size + args.epsilon);
)";

std::string weighted(const std::string& i, bool qk_norm) {
  std::string given = "args.packed.Read(row, front + " + i + ")";
  if (!qk_norm) return given;
  return "(" + given + " * inverse * (head < args.heads ? args.q_norm.Read(" + i +
         ") : args.k_norm.Read(" + i + ")))";
}

std::string body_of(bool qk_norm, bool in_rows) {
  std::string body = kBody;
  for (const auto& [word, by] : {std::pair<std::string, std::string>("NORM", qk_norm ? kNorm : ""),
                                 {"KEEPING", in_rows ? kKeepingRow : ""},
                                 {"WEIGHTED(other)", weighted("other", qk_norm)},
                                 {"WEIGHTED(i)", weighted("i", qk_norm)},
                                 {"KEEP", in_rows ? kKeepRow : kKeepFloat},
                                 {"STORE", in_rows ? kStoreRow : ""}})
    body.replace(body.find(word), word.size(), by);
  return body;
}

}  // namespace

KernelDescription append_heads(const HeadsShape& shape) {
  const std::string tokens = "tokens";
  const std::string positions = "positions";
  const std::int64_t packed = (shape.heads + 2 * shape.kv_heads) * shape.head_size;
  const std::vector<Size> cache{shape.kv_heads, std::string("capacity"), shape.head_size};
  const bool in_rows = shape.cache == Element::kInt8Rows;
  KernelDescription kernel{
      .name = "append_heads",
      .body = body_of(shape.qk_norm, in_rows),
      .tensors = {{.name = "packed", .element = Element::kActivation, .sizes = {tokens, packed}},
                  {.name = "cos", .sizes = {positions, shape.head_size / 2}},
                  {.name = "sin", .sizes = {positions, shape.head_size / 2}},
                  {.name = "query",
                   .element = Element::kActivation,
                   .access = Access::kWrite,
                   .sizes = {tokens, shape.heads * shape.head_size}},
                  {.name = "key", .element = shape.cache, .access = Access::kWrite, .sizes = cache},
                  {.name = "value_rows",
                   .element = shape.cache,
                   .access = Access::kWrite,
                   .sizes = cache}},
      .constants = {{"heads", shape.heads},
                    {"kv_heads", shape.kv_heads},
                    {"head_size", shape.head_size},
                    {"half", shape.head_size / 2},
                    {"scale", shape.scale},
                    {"epsilon", shape.epsilon}},
      .parameters = {"first", "past", "capacity"},
      .lanes = kLanes};
  if (in_rows) {
    kernel.constants["each"] = q4nx::ceil_div(shape.head_size, kLanes);
    kernel.constants["smallest"] = std::numeric_limits<float>::min();
  }
  if (shape.qk_norm) {
    kernel.tensors.push_back({.name = "q_norm", .sizes = {shape.head_size}});
    kernel.tensors.push_back({.name = "k_norm", .sizes = {shape.head_size}});
  }
  return kernel;
}

Grid append_heads_grid(const HeadsShape& shape, std::int64_t tokens) {
  return {.groups = {shape.heads + 2 * shape.kv_heads, tokens, 1}, .lanes = kLanes};
}

}  // namespace flownpu::gpu
