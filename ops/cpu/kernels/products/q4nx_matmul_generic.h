// SPDX-License-Identifier: Apache-2.0
// FusedDQP and Q4NXMatMul in plain C++. Read this definition first: it is correct on any processor,
// and slow.
#pragma once

#include "ops/cpu/kernels.h"
#include "ops/cpu/kernels/products/q4nx_generic.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// dot[32]: the dots of 32 rows of codes with one group of 32 activations x.
template <typename Total, typename Activation>
void dot_group(const Q4NXRows& weight, std::int64_t group, const Activation* x, Total* dot) {
  for (std::int64_t row = 0; row < q4nx::kBlockRows; ++row) dot[row] = 0;
  if (weight.layout.code_bits == 8) {
    const auto* codes = reinterpret_cast<const std::int8_t*>(weight.codes(group, 0));
    for (std::int64_t column = 0; column < q4nx::kGroup; ++column) {
      for (std::int64_t row = 0; row < q4nx::kBlockRows; ++row) {
        dot[row] += static_cast<Total>(codes[q4nx::Layout::byte_code_at(row, column)]) *
                    static_cast<Total>(x[column]);
      }
    }
    return;
  }
  const std::int8_t* values = code_values(weight, group);
  for (int strip = 0; strip < 2; ++strip) {
    for (std::int64_t column = 0; column < q4nx::kGroup; ++column) {
      const std::uint8_t* bytes = weight.codes(group, strip) + column * q4nx::kColumnBytes;
      for (std::int64_t pair = 0; pair < 8; ++pair) {
        Total* two = dot + strip * q4nx::kStripRows + pair * 2;
        two[0] += static_cast<Total>(values[bytes[pair] & 0x0f]) * static_cast<Total>(x[column]);
        two[1] += static_cast<Total>(values[bytes[pair] >> 4]) * static_cast<Total>(x[column]);
      }
    }
  }
}

// out[32] += (dot of codes) * scale + minimum * (sum of activations), for one group.
inline void add_group(const Q4NXRows& weight, std::int64_t group, const float* dot, float sum,
                      float* out) {
  for (std::int64_t row = 0; row < q4nx::kBlockRows; ++row) {
    const RowParameters w = row_parameters(weight, group, row);
    out[row] += dot[row] * w.scale + w.minimum * sum;
  }
}

inline void plain_matmul_bf16(const Q4NXRows& weight, const RoundedActivations& a,
                              std::int64_t first, std::int64_t count, std::byte* /*scratch*/,
                              float* out) {
  for (std::int64_t row = first; row < first + count; ++row, out += q4nx::kBlockRows) {
    std::memset(out, 0, q4nx::kBlockRows * sizeof(float));
    for (std::int64_t group = 0; group < weight.stored_groups; ++group) {
      const auto* values =
          static_cast<const std::uint16_t*>(a.values) + row * a.padded_k + group * q4nx::kGroup;
      float x[q4nx::kGroup];
      for (std::int64_t column = 0; column < q4nx::kGroup; ++column)
        x[column] = float_from_bf16(values[column]);
      float dot[q4nx::kBlockRows];
      dot_group(weight, group, x, dot);
      add_group(weight, group, dot, a.sums[row * a.groups + group], out);
    }
  }
}

inline void plain_matmul_int8(const Q4NXRows& weight, const RoundedActivations& a,
                              std::int64_t first, std::int64_t count, std::byte* /*scratch*/,
                              float* out) {
  for (std::int64_t row = first; row < first + count; ++row, out += q4nx::kBlockRows) {
    std::memset(out, 0, q4nx::kBlockRows * sizeof(float));
    for (std::int64_t group = 0; group < weight.stored_groups; ++group) {
      const auto* values =
          static_cast<const std::int8_t*>(a.values) + row * a.padded_k + group * q4nx::kGroup;
      std::int32_t integers[q4nx::kBlockRows];
      dot_group(weight, group, values, integers);
      float dot[q4nx::kBlockRows];
      for (std::int64_t i = 0; i < q4nx::kBlockRows; ++i) {
        dot[i] = static_cast<float>(integers[i]) * a.scales[row * a.groups + group];
      }
      add_group(weight, group, dot, a.sums[row * a.groups + group], out);
    }
  }
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
