// SPDX-License-Identifier: Apache-2.0
// The gates behind a delta rule and behind attention. In the first a work-group has a head of a
// token, whose elements are normalised together.
#include "ops/gpu/kernels/pieces.h"
#include "ops/gpu/kernels/states/kernels.h"

namespace flownpu::gpu {
namespace {

constexpr std::int64_t kLanes = 64;

constexpr const char* kNorm = R"(
  const int front = group(0) * args.size;
  const int row = group(1);
  shared float sums[args.lanes];
  shared float sixteenths[16];
  float sum = 0.0f;
  for (int i = lane(); i < args.size; i += args.lanes) {
    const float x = args.x.Read(row, front + i);
    sum += x * x;
  }
  SUM
  const float inverse = 1.0f / sqrt(sum / (float)args.size + args.epsilon);
  for (int i = lane(); i < args.size; i += args.lanes) {
    const float gate = args.gate.Read(row, front + i);
    const float normed = args.x.Read(row, front + i) * inverse * args.weight.Read(i);
    args.y.Write(normed * gate / (1.0f + exp(-gate)), row, front + i);
  }
)";

constexpr const char* kGate = R"(
  const int i = group(0) * args.lanes + lane();
  if (i < args.count) {
    args.y.Write(args.x.Read(i) / (1.0f + exp(-args.gate.Read(i))), i);
  }
)";

// x, gate and y, and after x one more, if there is one.
std::vector<TensorDescription> tensors(const std::vector<Size>& sizes,
                                       std::vector<TensorDescription> second = {}) {
  std::vector<TensorDescription> all = std::move(second);
  all.insert(all.begin(), {.name = "x", .element = Element::kActivation, .sizes = sizes});
  all.push_back({.name = "gate", .element = Element::kActivation, .sizes = sizes});
  all.push_back(
      {.name = "y", .element = Element::kActivation, .access = Access::kWrite, .sizes = sizes});
  return all;
}

}  // namespace

KernelDescription gated_rms_norm(std::int64_t columns, std::int64_t size, float epsilon) {
  return {
      .name = "gated_rms_norm",
      .body = replaced(kNorm, "SUM", over_lanes()),
      .tensors = tensors({std::string("tokens"), columns}, {{.name = "weight", .sizes = {size}}}),
      .constants = {{"size", size}, {"epsilon", epsilon}},
      .lanes = kLanes};
}

Grid gated_rms_norm_grid(std::int64_t columns, std::int64_t size, std::int64_t tokens) {
  return {.groups = {columns / size, tokens, 1}, .lanes = kLanes};
}

KernelDescription sigmoid_gate() {
  return {.name = "sigmoid_gate",
          .body = kGate,
          .tensors = tensors({std::string("all")}),
          .parameters = {"count"},
          .lanes = kLanes};
}

Grid sigmoid_gate_grid(std::int64_t count) {
  return {.groups = {q4nx::ceil_div(count, kLanes), 1, 1}, .lanes = kLanes};
}

}  // namespace flownpu::gpu
