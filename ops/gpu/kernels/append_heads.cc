// SPDX-License-Identifier: Apache-2.0
// QK-norm, rotation and append in one, as ML Drift fuses them: a work-group has one head of one
// token, a lane every 64th element of it.
#include "ops/gpu/kernels/kernels.h"

namespace flownpu::gpu {
namespace {

constexpr std::int64_t kLanes = 64;

// NORM sets `inverse`; WEIGHTED(i) is element i of the head after that.
constexpr const char* kBody = R"(
  const int head = group(0);
  const int row = args.first + group(1);
  const int position = args.past + group(1);
  const int front = head * args.head_size;
  NORM
  for (int i = lane(); i < args.head_size; i += args.lanes) {
    if (head < args.heads + args.kv_heads) {
      const int pair = i % args.half;
      const int other = i < args.half ? i + args.half : i - args.half;
      const float turned = WEIGHTED(other) * args.sin.Read(position, pair);
      const float rotated =
          WEIGHTED(i) * args.cos.Read(position, pair) + (i < args.half ? -turned : turned);
      if (head < args.heads) {
        args.query.Write(rotated * args.scale, row, front + i);
      } else {
        args.key.Write(rotated, head - args.heads, position, i);
      }
    } else {
      const float given = args.packed.Read(row, front + i);
      args.value_rows.Write(given, head - args.heads - args.kv_heads, position, i);
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

std::string body_of(bool qk_norm) {
  std::string body = kBody;
  for (const auto& [word, by] : {std::pair<std::string, std::string>("NORM", qk_norm ? kNorm : ""),
                                 {"WEIGHTED(other)", weighted("other", qk_norm)},
                                 {"WEIGHTED(i)", weighted("i", qk_norm)}})
    body.replace(body.find(word), word.size(), by);
  return body;
}

}  // namespace

KernelDescription append_heads(const HeadsShape& shape) {
  const std::string tokens = "tokens";
  const std::string positions = "positions";
  const std::int64_t packed = (shape.heads + 2 * shape.kv_heads) * shape.head_size;
  const std::vector<Size> cache{shape.kv_heads, std::string("capacity"), shape.head_size};
  KernelDescription kernel{
      .name = "append_heads",
      .body = body_of(shape.qk_norm),
      .tensors = {{.name = "packed", .sizes = {tokens, packed}},
                  {.name = "cos", .sizes = {positions, shape.head_size / 2}},
                  {.name = "sin", .sizes = {positions, shape.head_size / 2}},
                  {.name = "query",
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
