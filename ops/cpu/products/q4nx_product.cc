// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/products/q4nx_product.h"

namespace flownpu::cpu {
namespace {

// product[blocks][count][32] += bias[m], from row of blocks `block` on.
void add_bias(const Kernels& kernels, const float* bias, std::int64_t m, std::int64_t block,
              std::int64_t blocks, std::int64_t count, float* product) {
  if (bias == nullptr) return;
  for (std::int64_t b = 0; b < blocks; ++b) {
    const std::int64_t column = (block + b) * q4nx::kBlockRows;
    const std::int64_t columns = std::min(q4nx::kBlockRows, m - column);
    for (std::int64_t i = 0; i < count; ++i) {
      float* row = product + (b * count + i) * q4nx::kBlockRows;
      kernels.add(row, bias + column, row, columns);
    }
  }
}

}  // namespace

Gating gating_of(const Node& node, std::string_view otherwise) {
  const std::string text = node.text("gating", otherwise);
  return text == "geglu" ? Gating::kGeglu : text == "swiglu" ? Gating::kSwiglu : Gating::kNone;
}

// The padded K does not overflow: contracts bound K by 2^31.
Q4NXProduct::Q4NXProduct(const Context& context, std::int64_t k, const q4nx::Layout& layout,
                         Gating gating, const std::optional<SwigluScale>& scale)
    : context_(context),
      k_(k),
      padded_k_(q4nx::ceil_div(k, kPartColumns) * kPartColumns),
      layout_(layout),
      gating_(gating),
      scale_(scale) {}

// All but the memory for values, scales and sums.
RoundedActivations Q4NXProduct::empty(std::int64_t rows) const {
  RoundedActivations a;
  if (context_.activations == Activations::kInt8)
    a.order = context_.kernels.int8_order(rows, layout_);
  a.part_columns = a.order == Int8Order::kParts ? kPartColumns : q4nx::kGroup;
  a.padded_k = padded_k_;
  a.groups = padded_k_ / q4nx::kGroup;
  a.filled_groups = q4nx::ceil_div(k_, q4nx::kGroup);
  return a;
}

RoundedActivations Q4NXProduct::take(Scratch& scratch, std::int64_t rows) const {
  const bool int8 = context_.activations == Activations::kInt8;
  RoundedActivations a = empty(rows);
  if (a.order == Int8Order::kPanels) {
    a.panels = {.rows = rows,
                .values = scratch.take<std::int8_t>(rows * padded_k_),
                .scales = scratch.take<float>(rows * padded_k_ / kPartColumns),
                .sums = scratch.take<float>(rows * a.groups),
                .offsets = scratch.take<std::int32_t>(rows * a.groups)};
    return a;
  }
  a.values = scratch.take<std::byte>(rows * padded_k_ * (int8 ? 1 : 2));
  const std::int64_t parts = padded_k_ / a.part_columns;
  a.scales = int8 ? scratch.take<float>(rows * parts) : nullptr;
  a.sums = scratch.take<float>(rows * parts);
  return a;
}

// Takes as many scales, sums and offsets as there are groups: no order has more.
RoundedActivations Q4NXProduct::take_for_several(Scratch& scratch, std::int64_t rows) const {
  const bool int8 = context_.activations == Activations::kInt8;
  RoundedActivations a = empty(rows);
  a.values = scratch.take<std::byte>(rows * padded_k_ * (int8 ? 1 : 2));
  a.scales = int8 ? scratch.take<float>(rows * a.groups) : nullptr;
  a.sums = scratch.take<float>(rows * a.groups);
  a.panels.offsets = int8 ? scratch.take<std::int32_t>(rows * a.groups) : nullptr;
  return a;
}

RoundedActivations Q4NXProduct::rows_of(const RoundedActivations& all, std::int64_t first,
                                        std::int64_t rows) const {
  RoundedActivations some = empty(rows);
  const std::int64_t bytes = context_.activations == Activations::kInt8 ? 1 : 2;
  auto* values = static_cast<std::byte*>(const_cast<void*>(all.values)) + first * padded_k_ * bytes;
  const std::int64_t group = first * all.groups;
  if (some.order == Int8Order::kPanels) {
    some.panels = {.rows = rows,
                   .values = reinterpret_cast<std::int8_t*>(values),
                   .scales = const_cast<float*>(all.scales) + group,
                   .sums = const_cast<float*>(all.sums) + group,
                   .offsets = all.panels.offsets + group};
    return some;
  }
  some.values = values;
  some.scales = all.scales == nullptr ? nullptr : all.scales + group;
  some.sums = all.sums + group;
  return some;
}

void Q4NXProduct::round(const float* x, const RoundedActivations& a, std::int64_t row) const {
  const Kernels& kernels = context_.kernels;
  if (a.order == Int8Order::kPanels) {
    kernels.round_to_panels(x, k_, padded_k_ / kPartColumns, row, a.panels);
    return;
  }
  auto* values = static_cast<std::byte*>(const_cast<void*>(a.values));
  const std::int64_t parts = padded_k_ / a.part_columns;
  float* sums = const_cast<float*>(a.sums) + row * parts;
  if (a.scales != nullptr) {
    kernels.round_to_int8(x, k_, padded_k_, a.part_columns, kLargestInt8, values + row * padded_k_,
                          const_cast<float*>(a.scales) + row * parts, sums);
  } else {
    kernels.round_to_bf16(x, k_, padded_k_, values + row * padded_k_ * 2, sums);
  }
}

void Q4NXProduct::multiply_some(const Q4NXRows& weight, std::int64_t to_up,
                                const RoundedActivations& a, std::int64_t first, std::int64_t count,
                                std::int64_t block, std::int64_t blocks, const ProductBias& bias,
                                float* product) const {
  alignas(64) std::byte scratch[kMatMulScratchBytes];
  const Kernels& kernels = context_.kernels;
  const MatMulBlocks matmul =
      context_.activations == Activations::kInt8 ? kernels.matmul_int8 : kernels.matmul_bf16;
  matmul(weight, blocks, a, first, count, scratch, product);
  add_bias(kernels, bias.first, bias.m, block, blocks, count, product);
  if (gating_ == Gating::kNone) return;
  alignas(64) float up[kMaxProducts * q4nx::kBlockRows];
  Q4NXRows of_up = weight;
  of_up.bytes += to_up;
  matmul(of_up, blocks, a, first, count, scratch, up);
  add_bias(kernels, bias.up, bias.m, block, blocks, count, up);
  gate(up, blocks * count * q4nx::kBlockRows, product);
}

void Q4NXProduct::gate(const float* up, std::int64_t n, float* product) const {
  const Kernels& kernels = context_.kernels;
  if (gating_ == Gating::kGeglu) return kernels.geglu(product, up, product, n);
  if (scale_) return kernels.scaled_swiglu(product, up, *scale_, product, n);
  kernels.swiglu(product, up, product, n);
}

}  // namespace flownpu::cpu
