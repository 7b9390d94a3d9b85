// SPDX-License-Identifier: Apache-2.0
// The product with a Q4NX weight, for Q4NXMatMul and Q4NXMoE. Activations are rounded and
// multiplied by rows of blocks; a gated product has rows of blocks of the gate and of the up
// projection.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "ops/cpu/products/q4nx_matmul_plan.h"
#include "ops/cpu/step.h"
#include "ops/formats/q4nx.h"

namespace flownpu::cpu {

enum class Gating : std::uint8_t { kNone, kGeglu, kSwiglu };

// The attribute `gating`; `otherwise` if the node has none.
Gating gating_of(const Node& node, std::string_view otherwise);

// Numbers [m] that are added to a product's columns, before its gate: to those of the weight or of
// the gate, and to those of the up projection. Null: none.
struct ProductBias {
  const float* first = nullptr;
  const float* up = nullptr;
  std::int64_t m = 0;
};

// Products of activations of `k` columns with a weight of that layout.
class Q4NXProduct {
 public:
  // `scale`: of a SwiGLU that is more than silu(gate) * up.
  Q4NXProduct(const Context& context, std::int64_t k, const q4nx::Layout& layout, Gating gating,
              const std::optional<SwigluScale>& scale = std::nullopt);

  // Takes memory for the activations of a product of `rows` rows; a scratch without memory only
  // counts.
  RoundedActivations take(Scratch& scratch, std::int64_t rows) const;
  // Takes memory for several products of `rows` rows in all, in any division.
  RoundedActivations take_for_several(Scratch& scratch, std::int64_t rows) const;
  // Rows [first, first + rows) of memory from take_for_several, as the activations of one product.
  RoundedActivations rows_of(const RoundedActivations& all, std::int64_t first,
                             std::int64_t rows) const;
  // Rounds x[k] to row `row`.
  void round(const float* x, const RoundedActivations& activations, std::int64_t row) const;

  // Multiplies `count` rows of activations from `first` on by rows of blocks [begin, end) of the
  // weight; the up projection's row of blocks is `to_up` bytes after each of the gate's. Calls
  // finish(product[blocks][count][32], block, blocks) for some rows of blocks at a time.
  template <typename Finish>
  void multiply(const Q4NXRows& weight, std::int64_t to_up, const RoundedActivations& activations,
                std::int64_t first, std::int64_t count, std::int64_t begin, std::int64_t end,
                const Finish& finish, const ProductBias& bias = {}) const {
    alignas(64) float product[kMaxProducts * q4nx::kBlockRows];
    const std::int64_t each = kMaxProducts / count;
    for (std::int64_t block = begin; block < end; block += each) {
      const std::int64_t blocks = std::min(each, end - block);
      multiply_some(weight.from(block), to_up, activations, first, count, block, blocks, bias,
                    product);
      finish(product, block, blocks);
    }
  }

 private:
  RoundedActivations empty(std::int64_t rows) const;
  void multiply_some(const Q4NXRows& weight, std::int64_t to_up, const RoundedActivations& a,
                     std::int64_t first, std::int64_t count, std::int64_t block,
                     std::int64_t blocks, const ProductBias& bias, float* product) const;
  void gate(const float* up, std::int64_t n, float* product) const;

  Context context_;
  std::int64_t k_;
  std::int64_t padded_k_;
  q4nx::Layout layout_;
  Gating gating_;
  std::optional<SwigluScale> scale_;
};

}  // namespace flownpu::cpu
