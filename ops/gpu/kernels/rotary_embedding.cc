// SPDX-License-Identifier: Apache-2.0
// Rotates heads by their tokens' positions (RoPE); a lane has an element. The first 2 * half
// elements of a head are pairs, i and i + half, or if interleaved 2 i and 2 i + 1; the others stay.
#include "ops/gpu/kernels/kernels.h"

namespace flownpu::gpu {
namespace {

constexpr std::int64_t kLanes = 64;

constexpr const char* kBody = R"(
  const int token = group(1);
  const int k = group(0) * args.lanes + lane();
  if (k < args.width) {
    const int e = k % args.head_size;
    float rotated = args.x.Read(token, k);
    if (e < 2 * args.half) {
      const int pair = args.interleaved ? e / 2 : e % args.half;
      const int is_second = args.interleaved ? e % 2 : e / args.half;
      const int other = k + (is_second ? -1 : 1) * (args.interleaved ? 1 : args.half);
      const int position = args.positions.Read(token);
      const float turned = args.x.Read(token, other) * args.sin.Read(position, pair);
      rotated = rotated * args.cos.Read(position, pair) + (is_second ? turned : -turned);
    }
    args.y.Write(rotated, token, k);
  }
)";

}  // namespace

KernelDescription rotary_embedding(const RotationShape& shape) {
  const std::string tokens = "tokens";
  const std::string positions = "positions";
  return {.name = "rotary_embedding",
          .body = kBody,
          .tensors = {{.name = "x", .sizes = {tokens, shape.width}},
                      {.name = positions, .element = Element::kInt32, .sizes = {tokens}},
                      {.name = "cos", .sizes = {positions, shape.half}},
                      {.name = "sin", .sizes = {positions, shape.half}},
                      {.name = "y", .access = Access::kWrite, .sizes = {tokens, shape.width}}},
          .constants = {{"width", shape.width},
                        {"head_size", shape.head_size},
                        {"half", shape.half},
                        {"interleaved", std::int64_t{shape.interleaved ? 1 : 0}}},
          .lanes = kLanes};
}

Grid rotary_embedding_grid(const RotationShape& shape, std::int64_t tokens) {
  return {.groups = {q4nx::ceil_div(shape.width, kLanes), tokens, 1}, .lanes = kLanes};
}

}  // namespace flownpu::gpu
