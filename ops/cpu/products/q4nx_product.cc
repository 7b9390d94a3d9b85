// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/products/q4nx_product.h"

namespace flownpu::cpu {

Gating gating_of(const Node& node, std::string_view otherwise) {
  const std::string text = node.text("gating", otherwise);
  return text == "geglu" ? Gating::kGeglu : text == "swiglu" ? Gating::kSwiglu : Gating::kNone;
}

// The padded K is no longer than a weight that is there.
Q4NXProduct::Q4NXProduct(const Context& context, std::int64_t k, Gating gating)
    : context_(context),
      k_(k),
      padded_k_(q4nx::ceil_div(k, kPartColumns) * kPartColumns),
      gating_(gating) {}

std::int64_t Q4NXProduct::part_columns(std::int64_t rows) const {
  return context_.activations == Activations::kInt8 ? context_.kernels.int8_part_columns(rows)
                                                    : q4nx::kGroup;
}

RoundedActivations Q4NXProduct::take(Scratch& scratch, std::int64_t rows,
                                     std::int64_t part_columns) const {
  const bool int8 = context_.activations == Activations::kInt8;
  RoundedActivations activations;
  activations.padded_k = padded_k_;
  activations.groups = padded_k_ / q4nx::kGroup;
  activations.filled_groups = q4nx::ceil_div(k_, q4nx::kGroup);
  activations.values = scratch.take<std::byte>(rows * padded_k_ * (int8 ? 1 : 2));
  activations.part_columns = part_columns;
  const std::int64_t parts = padded_k_ / part_columns;
  activations.scales = int8 ? scratch.take<float>(rows * parts) : nullptr;
  activations.sums = scratch.take<float>(rows * parts);
  return activations;
}

RoundedActivations Q4NXProduct::rows_of(const RoundedActivations& all, std::int64_t first,
                                        std::int64_t rows) const {
  RoundedActivations some = all;
  const std::int64_t bytes = context_.activations == Activations::kInt8 ? 1 : 2;
  some.part_columns = part_columns(rows);
  some.values = static_cast<const std::byte*>(all.values) + first * padded_k_ * bytes;
  if (all.scales != nullptr) some.scales = all.scales + first * all.groups;
  some.sums = all.sums + first * all.groups;
  return some;
}

void Q4NXProduct::round(const float* x, const RoundedActivations& a, std::int64_t row) const {
  const Kernels& kernels = context_.kernels;
  auto* values = static_cast<std::byte*>(const_cast<void*>(a.values));
  const std::int64_t parts = padded_k_ / a.part_columns;
  float* sums = const_cast<float*>(a.sums) + row * parts;
  if (a.scales != nullptr) {
    kernels.round_to_int8(x, k_, padded_k_, a.part_columns, values + row * padded_k_,
                          const_cast<float*>(a.scales) + row * parts, sums);
  } else {
    kernels.round_to_bf16(x, k_, padded_k_, values + row * padded_k_ * 2, sums);
  }
}

void Q4NXProduct::multiply_some(const Q4NXRows& weight, std::int64_t to_up,
                                const RoundedActivations& a, std::int64_t first, std::int64_t count,
                                std::int64_t blocks, float* product) const {
  alignas(64) std::byte scratch[kMatMulScratchBytes];
  const Kernels& kernels = context_.kernels;
  const MatMulBlocks matmul =
      context_.activations == Activations::kInt8 ? kernels.matmul_int8 : kernels.matmul_bf16;
  matmul(weight, blocks, a, first, count, scratch, product);
  if (gating_ == Gating::kNone) return;
  alignas(64) float up[kMaxProducts * q4nx::kBlockRows];
  matmul(weight.from(to_up), blocks, a, first, count, scratch, up);
  const auto gate = gating_ == Gating::kGeglu ? kernels.geglu : kernels.swiglu;
  gate(product, up, product, blocks * count * q4nx::kBlockRows);
}

}  // namespace flownpu::cpu
