// SPDX-License-Identifier: Apache-2.0
// All code that knows Q4NX bytes: rounding of activations, products, and dequantised rows.
#if defined(__AVX512BF16__)
#include "ops/cpu/kernels/products/q4nx_matmul_avx512.h"
#elif defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)
#include "ops/cpu/kernels/products/q4nx_matmul_codes.h"
#endif
#include <algorithm>
#include <cstring>

#include "ops/cpu/kernels/products/q4nx_generic.h"
#if !defined(__AVX2__) && !defined(__ARM_FEATURE_DOTPROD)
#include "ops/cpu/kernels/products/q4nx_matmul_generic.h"
#endif
#include "ops/cpu/kernels/products/rounding.h"
#include "ops/cpu/kernels/tables.h"
#include "ops/cpu/kernels/vector.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

void round_to_bf16(const float* x, std::int64_t k, std::int64_t padded_k, void* values,
                   float* sums) {
  auto* out = static_cast<std::uint16_t*>(values);
  for (std::int64_t start = 0; start < padded_k; start += q4nx::kGroup) {
    const Group group = load_group(x, start, k);
    Vector sum{};
    for (const Vector part : group.part) {
      const Bits bits = bf16_bits(part);
      const Halves halves = __builtin_convertvector(bits, Halves);
      std::memcpy(out, &halves, sizeof(halves));
      out += kLanes;
      sum += reinterpret_cast<Vector>(bits << 16);
    }
    *sums++ = reduce_add(sum);
  }
}

// NaN or an infinity in a part makes the part's scale NaN or infinite, and all products with the
// part NaN.
void round_to_int8(const float* x, std::int64_t k, std::int64_t padded_k, std::int64_t part_columns,
                   int largest, void* values, float* scales, float* sums) {
  auto* out = static_cast<std::int8_t*>(values);
  for (std::int64_t start = 0; start < padded_k; start += part_columns) {
    const Int8Scale scale = int8_scale(x, start, part_columns, k, largest);
    Vector sum{};
    for (std::int64_t at = start; at < start + part_columns; at += q4nx::kGroup) {
      const Group group = load_group(x, at, k);
      Integers integers[Group::kVectors];
      for (int v = 0; v < Group::kVectors; ++v) {
        const Vector rounded = round_to_integer(group.part[v] * scale.inverse);
        integers[v] = __builtin_convertvector(rounded, Integers);
        sum += rounded;
      }
      store_group(out, integers);
      out += q4nx::kGroup;
    }
    // A sum of 256 integers up to 127 is exact.
    *scales++ = scale.scale;
    *sums++ = reduce_add(sum) * scale.scale;
  }
}

void dequantize_row(const Q4NXRows& weight, std::int64_t row, std::int64_t k, float* out) {
  const int strip = row < q4nx::kStripRows ? 0 : 1;
  const std::int64_t byte = row % q4nx::kStripRows / 2;
  const int shift = row % 2 == 0 ? 0 : 4;
  for (std::int64_t start = 0; start < k; start += q4nx::kGroup) {
    const std::int64_t group = start / q4nx::kGroup;
    const RowParameters w = row_parameters(weight, group, row);
    const std::int64_t end = std::min(start + q4nx::kGroup, k);
    if (weight.layout.code_bits == 8) {
      const auto* bytes = reinterpret_cast<const std::int8_t*>(weight.codes(group, 0));
      for (std::int64_t column = start; column < end; ++column) {
        const std::int8_t code = bytes[q4nx::Layout::byte_code_at(row, column - start)];
        out[column] = w.minimum + w.scale * static_cast<float>(code);
      }
      continue;
    }
    const std::int8_t* values = code_values(weight, group);
    const std::uint8_t* codes = weight.codes(group, strip) + byte;
    for (std::int64_t column = start; column < end; ++column) {
      const std::int8_t value = values[(*codes >> shift) & 0x0f];
      out[column] = w.minimum + w.scale * static_cast<float>(value);
      codes += q4nx::kColumnBytes;
    }
  }
}

// MatMulBlocks by a kernel that takes a single row of blocks.
template <auto MULTIPLY>
void each_row_of_blocks(const Q4NXRows& weight, std::int64_t row_blocks,
                        const RoundedActivations& a, std::int64_t first, std::int64_t count,
                        std::byte* scratch, float* out) {
  for (std::int64_t block = 0; block < row_blocks; ++block)
    MULTIPLY(weight.from(block), a, first, count, scratch, out + block * count * q4nx::kBlockRows);
}

}  // namespace

void fill_q4nx_matmul(Kernels& kernels) {
  kernels.round_to_bf16 = round_to_bf16;
  kernels.round_to_int8 = round_to_int8;
#if defined(__AVX512BF16__)
  kernels.matmul_bf16 = matmul_bf16;
  kernels.matmul_int8 = matmul_int8;
  kernels.round_to_panels = round_to_panels;
  kernels.int8_order = int8_order;
#else
#if defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)
  kernels.matmul_bf16 = each_row_of_blocks<matmul_bf16>;
  kernels.matmul_int8 = each_row_of_blocks<matmul_int8>;
#else
  kernels.matmul_bf16 = each_row_of_blocks<plain_matmul_bf16>;
  kernels.matmul_int8 = each_row_of_blocks<plain_matmul_int8>;
#endif
  kernels.int8_order = [](std::int64_t, const q4nx::Layout&) { return Int8Order::kGroups; };
#endif
  kernels.dequantize_row = dequantize_row;
}

}  // namespace flownpu::cpu::FLOWNPU_ISA
