// SPDX-License-Identifier: Apache-2.0
// Products with dense weights on the CPU: DenseMatMul, and other operators that are such products
// (MatMul and Gemm with a constant weight, MatMul of two activations, convolutions).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "ops/cpu/step.h"
#include "ops/system/processors.h"

namespace flownpu::cpu {

// Rows of `k` elements, rounded so, whose values are still to be set. Elements from k to padded_k
// are 0.
RoundedActivations rounded_rows(const DenseRounding& rounding, std::int64_t k);

// Memory for packed columns, 64-byte aligned: large pages for weights of several of them (2 MiB);
// they would waste most of one with a small weight.
std::shared_ptr<std::byte> allocate_weight(std::size_t bytes);

// y = activation(X . W + bias) + residual for X f32 [rows][k]. A constant weight is packed once,
// where it is kept; others panel by panel from their place in memory in each run, so that working
// memory does not grow with the weight. A few rows are multiplied by the weight as it lies, in f32.
class DenseProduct {
 public:
  // A product in f32.
  explicit DenseProduct(const Context& context)
      : context_(context), cache_bytes_(second_level_cache_bytes()) {}

  // From now on activations and weights of more than a few columns are rounded as the option
  // `activations` says, if the instruction set has dot products for a weight of this type; products
  // of a few rows round nothing.
  void round_as_chosen(DataType weight, std::int64_t m);
  // From now on both are rounded to bf16 if the instruction set has dot products of bf16.
  void round_to_bf16() { rounding_ = context_.kernels.dense_rounding(false, DataType::kFloat32); }

  // Packs the constant that all runs will have as `weight`.
  void keep(const DenseWeight& weight);

  // Bytes that run() needs for a product of these sizes, 64-byte aligned.
  std::size_t scratch_bytes(std::int64_t rows, std::int64_t k, std::int64_t m) const;
  // x is f32 [rows][weight.k]; epilogue.m must be weight.m.
  void run(const float* x, std::int64_t rows, const DenseWeight& weight, ProductEpilogue epilogue,
           std::byte* scratch) const;

  // For callers that round activations themselves, to bf16 or not at all: the bytes of an element,
  // and rows of `k` elements.
  std::int64_t element_bytes() const;
  RoundedActivations rows_of(std::int64_t k) const { return rounded_rows(rounding_, k); }
  // The product of such rows with the weight that is kept; needs no scratch.
  void run_rounded(const RoundedActivations& activations, std::int64_t rows,
                   const ProductEpilogue& epilogue) const;

 private:
  struct Work;

  // Up to this many rows are multiplied in f32 by the weight as it lies: packing a column costs as
  // much as multiplying it by so few.
  static constexpr std::int64_t kFewRows = 4;

  Work take(Scratch& scratch, std::int64_t rows, std::int64_t k, std::int64_t m) const;
  void round(const float* x, std::int64_t rows, std::int64_t k, Work& work) const;
  void pack(const DenseWeight& weight, std::int64_t first_block, std::int64_t blocks,
            std::byte* packed) const;
  void multiply(const Work& work, const std::byte* packed, std::int64_t first_block,
                std::int64_t blocks, std::int64_t rows, const ProductEpilogue& epilogue) const;
  void multiply_few(const float* x, std::int64_t rows, const DenseWeight& weight,
                    const ProductEpilogue& epilogue) const;

  Context context_;
  DenseRounding rounding_;
  std::int64_t cache_bytes_;
  std::int64_t few_rows_ = kFewRows;
  // The constant weight in blocks of packed columns; null: none.
  std::shared_ptr<std::byte> kept_;
};

// Throws Error if W is not a constant of two axes, or another operand does not fit it.
std::unique_ptr<Step> make_dense_matmul(const Node& node, const Context& context);
// MatMul whose right operand is not constant, or has other than two axes.
std::unique_ptr<Step> make_activations_matmul(const Node& node, const Context& context);

}  // namespace flownpu::cpu
