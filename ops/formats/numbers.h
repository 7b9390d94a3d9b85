// SPDX-License-Identifier: Apache-2.0
// Conversion between float and the bits of the floating-point formats bf16, IEEE half and
// float8e8m0.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

namespace flownpu {

// bf16 is the upper half of f32. Rounds to nearest even; NaN stays NaN.
inline std::uint16_t to_bfloat16(float value) {
  auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return static_cast<std::uint16_t>((bits >> 16) | 0x40U);
  bits += 0x7fffU + ((bits >> 16) & 1U);
  return static_cast<std::uint16_t>(bits >> 16);
}

inline float from_bfloat16(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

inline std::uint16_t to_half(float value) {
  return std::bit_cast<std::uint16_t>(static_cast<_Float16>(value));
}

inline float from_half(std::uint16_t bits) {
  return static_cast<float>(std::bit_cast<_Float16>(bits));
}

// 2^(bits - 127), of which the least is denormal in f32.
inline float from_float8e8m0(std::uint8_t bits) {
  if (bits == 255) return std::numeric_limits<float>::quiet_NaN();
  return bits == 0 ? 0x1p-127F : std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 23);
}

}  // namespace flownpu
