// SPDX-License-Identifier: Apache-2.0
// FusedDQP and Q4NXMatMul in plain C++: the definition to read first, correct on any processor, and
// slow.
#pragma once

#include "ops/cpu/kernels.h"
#include "ops/cpu/kernels/vector.h"
#include "ops/q4nx.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// The dots of 32 rows of codes with one group of 32 activations, value(column).
template <typename Total, typename Activation>
void dot_group(const std::uint8_t* codes, const Activation* x, Total* dot) {
  for (std::int64_t row = 0; row < q4nx::kBlockRows; ++row) dot[row] = 0;
  for (std::int64_t strip = 0; strip < 2; ++strip) {
    for (std::int64_t column = 0; column < q4nx::kGroup; ++column) {
      const std::uint8_t* bytes = codes + strip * q4nx::kStripBytes + column * q4nx::kColumnBytes;
      for (std::int64_t pair = 0; pair < 8; ++pair) {
        Total* two = dot + strip * 16 + pair * 2;
        two[0] += static_cast<Total>(bytes[pair] & 0x0f) * static_cast<Total>(x[column]);
        two[1] += static_cast<Total>(bytes[pair] >> 4) * static_cast<Total>(x[column]);
      }
    }
  }
}

// out[32] += (dot of codes) * scale + minimum * (sum of activations), for one group.
inline void add_group(const std::uint8_t* block, std::int64_t within, const float* dot, float sum,
                      float* out) {
  std::uint16_t scale[q4nx::kBlockRows];
  std::uint16_t minimum[q4nx::kBlockRows];
  std::memcpy(scale, block + within * 64, sizeof(scale));
  std::memcpy(minimum, block + q4nx::kMinimumOffset + within * 64, sizeof(minimum));
  for (std::int64_t row = 0; row < q4nx::kBlockRows; ++row) {
    out[row] += dot[row] * float_from_bf16(scale[row]) + float_from_bf16(minimum[row]) * sum;
  }
}

inline void matmul_bf16(const std::uint8_t* blocks, const RoundedActivations& a, std::int64_t first,
                        std::int64_t count, std::byte* /*scratch*/, float* out) {
  for (std::int64_t row = first; row < first + count; ++row, out += q4nx::kBlockRows) {
    std::memset(out, 0, q4nx::kBlockRows * sizeof(float));
    for (std::int64_t group = 0; group < a.groups; ++group) {
      const std::int64_t within = group % q4nx::kGroupsPerBlock;
      const std::uint8_t* block = blocks + group / q4nx::kGroupsPerBlock * q4nx::kBlockBytes;
      const auto* values =
          static_cast<const std::uint16_t*>(a.values) + row * a.padded_k + group * q4nx::kGroup;
      float x[q4nx::kGroup];
      for (std::int64_t column = 0; column < q4nx::kGroup; ++column)
        x[column] = float_from_bf16(values[column]);
      float dot[q4nx::kBlockRows];
      dot_group(block + q4nx::kCodeOffset + within * q4nx::kGroup * q4nx::kColumnBytes, x, dot);
      add_group(block, within, dot, a.sums[row * a.groups + group], out);
    }
  }
}

inline void matmul_int8(const std::uint8_t* blocks, const RoundedActivations& a, std::int64_t first,
                        std::int64_t count, std::byte* /*scratch*/, float* out) {
  for (std::int64_t row = first; row < first + count; ++row, out += q4nx::kBlockRows) {
    std::memset(out, 0, q4nx::kBlockRows * sizeof(float));
    for (std::int64_t group = 0; group < a.groups; ++group) {
      const std::int64_t within = group % q4nx::kGroupsPerBlock;
      const std::uint8_t* block = blocks + group / q4nx::kGroupsPerBlock * q4nx::kBlockBytes;
      const auto* values =
          static_cast<const std::int8_t*>(a.values) + row * a.padded_k + group * q4nx::kGroup;
      std::int32_t integers[q4nx::kBlockRows];
      dot_group(block + q4nx::kCodeOffset + within * q4nx::kGroup * q4nx::kColumnBytes, values,
                integers);
      float dot[q4nx::kBlockRows];
      for (std::int64_t i = 0; i < q4nx::kBlockRows; ++i) {
        dot[i] = static_cast<float>(integers[i]) * a.scales[row * a.groups + group];
      }
      add_group(block, within, dot, a.sums[row * a.groups + group], out);
    }
  }
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
