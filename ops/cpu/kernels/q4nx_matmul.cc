// SPDX-License-Identifier: Apache-2.0
// Everything that touches Q4NX bytes: rounding of activations, products, rows of a table.
#if defined(__AVX512BF16__)
#include "ops/cpu/kernels/q4nx_matmul_avx512.h"
#elif defined(__AVX2__)
#include "ops/cpu/kernels/q4nx_matmul_avx2.h"
#else
#include "ops/cpu/kernels/q4nx_matmul_generic.h"
#endif
#include <cmath>

#include "ops/cpu/kernels/tables.h"
#include "ops/cpu/kernels/vector.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

void round_to_bf16(const float* x, std::int64_t k, std::int64_t padded_k, void* values,
                   float* sums) {
  auto* out = static_cast<std::uint16_t*>(values);
  for (std::int64_t start = 0; start < padded_k; start += q4nx::kGroup) {
    float sum = 0;
    for (std::int64_t i = start; i < start + q4nx::kGroup; ++i) {
      out[i] = i < k ? bf16_from_float(x[i]) : std::uint16_t{0};
      sum += float_from_bf16(out[i]);
    }
    *sums++ = sum;
  }
}

void round_to_int8(const float* x, std::int64_t k, std::int64_t padded_k, void* values,
                   float* scales, float* sums) {
  auto* out = static_cast<std::int8_t*>(values);
  for (std::int64_t start = 0; start < padded_k; start += q4nx::kGroup) {
    const std::int64_t end = start + q4nx::kGroup < k ? start + q4nx::kGroup : k;
    float largest = 0;
    for (std::int64_t i = start; i < end; ++i) largest = std::fmax(largest, std::fabs(x[i]));
    // 127, not 128: the range is symmetric, so that -x rounds to minus what x rounds to.
    const float scale = largest / 127.0F;
    const float inverse = largest > 0 ? 127.0F / largest : 0.0F;
    std::int32_t sum = 0;
    for (std::int64_t i = start; i < start + q4nx::kGroup; ++i) {
      const float scaled = i < end ? x[i] * inverse : 0.0F;
      out[i] = static_cast<std::int8_t>(std::nearbyint(scaled));
      sum += out[i];
    }
    *scales++ = scale;
    *sums++ = static_cast<float>(sum) * scale;
  }
}

void dequantize_row(const std::uint8_t* blocks, std::int64_t row, std::int64_t k, float* out) {
  const std::int64_t strip = row / 16;
  const std::int64_t byte = row % 16 / 2;
  const int shift = row % 2 == 0 ? 0 : 4;
  for (std::int64_t column = 0; column < k; ++column) {
    const std::int64_t within = column % q4nx::kBlockColumns;
    const std::uint8_t* block = blocks + column / q4nx::kBlockColumns * q4nx::kBlockBytes;
    const std::uint8_t* parameters = block + within / q4nx::kGroup * 64 + row * 2;
    std::uint16_t scale;
    std::uint16_t minimum;
    std::memcpy(&scale, parameters, sizeof(scale));
    std::memcpy(&minimum, parameters + q4nx::kMinimumOffset, sizeof(minimum));
    const std::uint8_t codes =
        block[q4nx::kCodeOffset + strip * q4nx::kStripBytes + within * q4nx::kColumnBytes + byte];
    out[column] = float_from_bf16(minimum) +
                  float_from_bf16(scale) * static_cast<float>((codes >> shift) & 0x0f);
  }
}

}  // namespace

void fill_q4nx_matmul(Kernels& kernels) {
  kernels.round_to_bf16 = round_to_bf16;
  kernels.round_to_int8 = round_to_int8;
  kernels.matmul_bf16 = matmul_bf16;
  kernels.matmul_int8 = matmul_int8;
  kernels.dequantize_row = dequantize_row;
}

}  // namespace flownpu::cpu::FLOWNPU_ISA
