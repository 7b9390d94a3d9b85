// SPDX-License-Identifier: Apache-2.0
// DenseMatMul: weights of any type to 32 columns in the order of a kernel, products of many rows,
// and what becomes of them.
#include "ops/cpu/kernels/dense_matmul_float.h"
#include "ops/cpu/kernels/tables.h"
#if defined(__AVX512BF16__)
#include "ops/cpu/kernels/dense_matmul_avx512.h"
#endif
#include "ops/cpu/kernels/activations.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

DenseRounding dense_rounding([[maybe_unused]] bool int8) {
#if defined(__AVX512BF16__)
  return int8 ? DenseRounding::kInt8 : DenseRounding::kBFloat16;
#else
  return DenseRounding::kFloat;
#endif
}

std::int64_t dense_block_bytes(std::int64_t k, [[maybe_unused]] DenseRounding rounding) {
#if defined(__AVX512BF16__)
  if (rounding == DenseRounding::kInt8) return int8_block_bytes(k);
  if (rounding == DenseRounding::kBFloat16) return bf16_block_bytes(k);
#endif
  return k * kDenseColumns * static_cast<std::int64_t>(sizeof(float));
}

void pack_dense(const DenseWeight& weight, std::int64_t block,
                [[maybe_unused]] DenseRounding rounding, std::byte* packed) {
#if defined(__AVX512BF16__)
  if (rounding == DenseRounding::kInt8) return pack_int8(weight, block, packed);
  if (rounding == DenseRounding::kBFloat16) return pack_bf16(weight, block, packed);
#endif
  widen_columns(weight, 0, weight.k, block, reinterpret_cast<float*>(packed));
  scale_columns(weight, weight.k, block, reinterpret_cast<float*>(packed));
}

void matmul_dense(const std::byte* packed, [[maybe_unused]] DenseRounding rounding,
                  const RoundedActivations& a, std::int64_t first, std::int64_t count, float* out) {
#if defined(__AVX512BF16__)
  if (rounding == DenseRounding::kInt8) return dense_int8(packed, a, first, count, out);
  if (rounding == DenseRounding::kBFloat16) return dense_bf16(packed, a, first, count, out);
#endif
  dense_float(packed, a, first, count, out);
}

// One row of 32 columns, of which the first `columns` are y's.
template <Activation ACTIVATION, bool STREAMED>
void finish_row(const float* product, std::int64_t columns, const float* bias,
                const float* residual, float* y) {
  for (std::int64_t i = 0; i < columns; i += kLanes) {
    const std::int64_t count = std::min<std::int64_t>(kLanes, columns - i);
    Vector value = load(product + i);
    if (bias != nullptr) value += load_some(bias + i, count);
    value = activate<ACTIVATION>(value);
    if (residual != nullptr) value += load_some(residual + i, count);
    if constexpr (STREAMED) {
      store_past_caches(y + i, value);
    } else {
      store_some(y + i, value, count);
    }
  }
}

void finish_dense(const float* product, std::int64_t first, std::int64_t count, std::int64_t column,
                  const DenseEpilogue& e) {
  const std::int64_t columns = std::min(kDenseColumns, e.m - column);
  const float* bias = e.bias == nullptr ? nullptr : e.bias + column;
  const auto finish = [&]<Activation ACTIVATION, bool STREAMED>() {
    for (std::int64_t row = first; row < first + count; ++row, product += kDenseColumns) {
      const std::int64_t at = row * e.m + column;
      const float* residual = e.residual == nullptr ? nullptr : e.residual + at;
      finish_row<ACTIVATION, STREAMED>(product, columns, bias, residual, e.y + at);
    }
  };
  // Only whole vectors at addresses that are a multiple of theirs.
  const bool whole =
      e.m % kLanes == 0 && reinterpret_cast<std::uintptr_t>(e.y) % sizeof(Vector) == 0;
  with_activation(e.activation, [&]<Activation ACTIVATION>() {
    if (e.streamed && whole) {
      finish.template operator()<ACTIVATION, true>();
    } else {
      finish.template operator()<ACTIVATION, false>();
    }
  });
  if (e.streamed) finish_streams();
}

}  // namespace

void fill_dense_matmul(Kernels& kernels) {
  kernels.dense_rounding = dense_rounding;
  kernels.dense_block_bytes = dense_block_bytes;
  kernels.pack_dense = pack_dense;
  kernels.matmul_dense = matmul_dense;
  kernels.finish_dense = finish_dense;
}

}  // namespace flownpu::cpu::FLOWNPU_ISA
