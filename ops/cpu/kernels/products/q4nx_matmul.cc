// SPDX-License-Identifier: Apache-2.0
// Everything that touches Q4NX bytes: rounding of activations, products, rows of a table.
#if defined(__AVX512BF16__)
#include "ops/cpu/kernels/products/q4nx_matmul_avx512.h"
#elif defined(__AVX2__)
#include "ops/cpu/kernels/products/q4nx_matmul_avx2.h"
#else
#include "ops/cpu/kernels/products/q4nx_matmul_generic.h"
#endif
#include <algorithm>
#include <cstring>
#include <limits>

#include "ops/cpu/kernels/products/q4nx_generic.h"
#include "ops/cpu/kernels/tables.h"
#include "ops/cpu/kernels/vector.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

typedef std::int16_t Shorts __attribute__((vector_size(kLanes * 2)));

// The 32 values of the group that begins at `start`, zero past the end of a row.
struct Group {
  static constexpr int kVectors = static_cast<int>(q4nx::kGroup) / kLanes;
  Vector part[kVectors];
};

Group load_group(const float* x, std::int64_t start, std::int64_t k) {
  Group group;
  float padded[q4nx::kGroup] = {};
  const float* from = x + start;
  if (k - start < q4nx::kGroup) {
    const std::int64_t rest = std::max<std::int64_t>(k - start, 0);
    if (rest > 0) std::memcpy(padded, from, static_cast<std::size_t>(rest) * sizeof(float));
    from = padded;
  }
  for (int v = 0; v < Group::kVectors; ++v) group.part[v] = load(from + v * kLanes);
  return group;
}

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

// The largest magnitude of `columns` columns from `start` on; NaN if one is NaN.
float largest_magnitude(const float* x, std::int64_t start, std::int64_t columns, std::int64_t k) {
  Vector magnitudes{};
  for (std::int64_t at = start; at < std::min(start + columns, k); at += q4nx::kGroup) {
    // 16 groups ahead, 32 lines; other distances were not tried.
    __builtin_prefetch(x + at + 16 * q4nx::kGroup);
    __builtin_prefetch(x + at + 16 * q4nx::kGroup + q4nx::kGroup / 2);
    for (const Vector part : load_group(x, at, k).part)
      magnitudes = larger_magnitude(magnitudes, magnitude(part));
  }
  return reduce_larger_magnitude(magnitudes);
}

// NaN or an infinity in a part makes its scale one, and so NaN of all products with the part.
void round_to_int8(const float* x, std::int64_t k, std::int64_t padded_k, std::int64_t part_columns,
                   void* values, float* scales, float* sums) {
  // Up to here 127 / largest would be infinite: no more than 4e-37, which is taken for 0.
  constexpr float kNegligible = 127.0F / std::numeric_limits<float>::max();
  auto* out = static_cast<std::int8_t*>(values);
  for (std::int64_t start = 0; start < padded_k; start += part_columns) {
    const float largest = largest_magnitude(x, start, part_columns, k);
    // 127, not 128: the range is symmetric, so that -x rounds to minus what x rounds to.
    const float scale = largest / 127.0F;
    const float inverse = largest > kNegligible ? 127.0F / largest : 0.0F;
    Vector sum{};
    for (std::int64_t at = start; at < start + part_columns; at += q4nx::kGroup) {
      for (const Vector part : load_group(x, at, k).part) {
        const Vector rounded = round_to_integer(part * inverse);
        const Integers integers = __builtin_convertvector(rounded, Integers);
        // By way of 16 bits: from 32 to 8, GCC 12 goes lane by lane where there is no AVX-512.
        const Shorts shorts = __builtin_convertvector(integers, Shorts);
        const Bytes bytes = __builtin_convertvector(shorts, Bytes);
        std::memcpy(out, &bytes, sizeof(bytes));
        out += kLanes;
        sum += rounded;
      }
    }
    // A sum of 256 integers up to 127 is exact.
    *scales++ = scale;
    *sums++ = reduce_add(sum) * scale;
  }
}

void dequantize_row(const Q4NXRows& weight, std::int64_t row, std::int64_t k, float* out) {
  const int strip = row < q4nx::kStripRows ? 0 : 1;
  const std::int64_t byte = row % q4nx::kStripRows / 2;
  const int shift = row % 2 == 0 ? 0 : 4;
  for (std::int64_t start = 0; start < k; start += q4nx::kGroup) {
    const std::int64_t group = start / q4nx::kGroup;
    const RowParameters w = row_parameters(weight, group, row);
    const std::uint8_t* codes = weight.codes(group, strip) + byte;
    for (std::int64_t column = start; column < std::min(start + q4nx::kGroup, k); ++column) {
      out[column] = w.minimum + w.scale * static_cast<float>((*codes >> shift) & 0x0f);
      codes += q4nx::kColumnBytes;
    }
  }
}

// Kernels of one row of blocks, one row after the other.
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
  kernels.int8_part_columns = int8_part_columns;
#else
  kernels.matmul_bf16 = each_row_of_blocks<matmul_bf16>;
  kernels.matmul_int8 = each_row_of_blocks<matmul_int8>;
  kernels.int8_part_columns = [](std::int64_t) { return q4nx::kGroup; };
#endif
  kernels.dequantize_row = dequantize_row;
}

}  // namespace flownpu::cpu::FLOWNPU_ISA
