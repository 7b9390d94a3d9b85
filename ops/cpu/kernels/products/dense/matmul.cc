// SPDX-License-Identifier: Apache-2.0
// DenseMatMul: packs weights of any type, 32 columns at a time, in the order that a kernel reads,
// and multiplies them by many rows; and multiplies a weight as it lies by a few rows.
#include "ops/cpu/kernels/products/dense/float.h"
#include "ops/cpu/kernels/products/dense/rows.h"
#include "ops/cpu/kernels/tables.h"
#if defined(__AVX512BF16__)
#include "ops/cpu/kernels/products/dense/matmul_avx512.h"
#elif defined(__AVX2__)
#include "ops/cpu/kernels/products/dense/matmul_avx2.h"
#endif

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

DenseRounding dense_rounding([[maybe_unused]] bool int8, [[maybe_unused]] DataType weight) {
#if defined(__AVX2__)
  if (int8) return int8_rounding(weight);
#endif
#if defined(__AVX512BF16__)
  return {DenseType::kBFloat16};
#else
  return {};
#endif
}

std::int64_t dense_block_bytes(std::int64_t k, [[maybe_unused]] const DenseRounding& rounding) {
#if defined(__AVX2__)
  if (rounding.type == DenseType::kInt8) return int8_block_bytes(k, rounding.part_columns(k));
#endif
#if defined(__AVX512BF16__)
  if (rounding.type == DenseType::kBFloat16) return bf16_block_bytes(k);
#endif
  return k * kDenseColumns * static_cast<std::int64_t>(sizeof(float));
}

void pack_dense(const DenseWeight& weight, std::int64_t block,
                [[maybe_unused]] const DenseRounding& rounding, std::byte* packed) {
#if defined(__AVX2__)
  if (rounding.type == DenseType::kInt8)
    return pack_int8(weight, block, rounding.part_columns(weight.k), packed);
#endif
#if defined(__AVX512BF16__)
  if (rounding.type == DenseType::kBFloat16) return pack_bf16(weight, block, packed);
#endif
  widen_columns(weight, 0, weight.k, block, reinterpret_cast<float*>(packed));
  scale_columns(weight, weight.k, block, reinterpret_cast<float*>(packed));
}

void matmul_dense(const std::byte* packed, [[maybe_unused]] DenseType type,
                  const RoundedActivations& a, std::int64_t first, std::int64_t count,
                  std::int64_t columns, float* out) {
#if defined(__AVX2__)
  if (type == DenseType::kInt8) return dense_int8(packed, a, first, count, columns, out);
#endif
#if defined(__AVX512BF16__)
  if (type == DenseType::kBFloat16) return dense_bf16(packed, a, first, count, out);
#endif
  dense_float(packed, a, first, count, columns, out);
}

}  // namespace

void fill_dense_matmul(Kernels& kernels) {
  kernels.dense_rounding = dense_rounding;
  kernels.dense_block_bytes = dense_block_bytes;
  kernels.pack_dense = pack_dense;
  kernels.matmul_dense = matmul_dense;
  kernels.dense_rows = dense_rows;
#if defined(__AVX2__) && !defined(__AVX512F__)
  kernels.round_to_unsigned = round_to_unsigned;
#endif
}

}  // namespace flownpu::cpu::FLOWNPU_ISA
