// SPDX-License-Identifier: Apache-2.0
// Products with dense weights on the CPU: DenseMatMul, and other operators that are such products
// (MatMul and Gemm with a constant weight, MatMul of two activations, a convolution of patches).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "ops/cpu/step.h"
#include "ops/system/processors.h"

namespace flownpu::cpu {

// y = activation(X . W + bias) + residual for X f32 [rows][k]. Packs the weight panel by panel from
// its place in memory, so that working memory does not grow with the weight.
class DenseProduct {
 public:
  // `rounding`: what activations and weights are rounded to; products of a few rows round nothing.
  DenseProduct(const Context& context, DenseRounding rounding)
      : context_(context), rounding_(rounding), cache_bytes_(second_level_cache_bytes()) {}

  // Rounds as the option `activations` says, if the instruction set has dot products.
  static DenseProduct rounded(const Context& context);

  // Bytes that run() needs for a product of these sizes, 64-byte aligned.
  std::size_t scratch_bytes(std::int64_t rows, std::int64_t k, std::int64_t m) const;
  // x is f32 [rows][weight.k]; epilogue.m must be weight.m.
  void run(const float* x, std::int64_t rows, const DenseWeight& weight, ProductEpilogue epilogue,
           std::byte* scratch) const;

 private:
  struct Work;

  Work take(Scratch& scratch, std::int64_t rows, std::int64_t k, std::int64_t m) const;
  void round(const float* x, std::int64_t rows, std::int64_t k, Work& work) const;
  void multiply(const Work& work, std::int64_t first_block, std::int64_t blocks, std::int64_t rows,
                const ProductEpilogue& epilogue) const;

  Context context_;
  DenseRounding rounding_;
  std::int64_t cache_bytes_;
};

// Throws Error if W is not a constant of two axes, or another operand does not fit it.
std::unique_ptr<Step> make_dense_matmul(const Node& node, const Context& context);
// MatMul whose right operand is not constant, or has other than two axes.
std::unique_ptr<Step> make_activations_matmul(const Node& node, const Context& context);

}  // namespace flownpu::cpu
