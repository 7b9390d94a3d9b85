// SPDX-License-Identifier: Apache-2.0
// Element types, accumulator tags and the core's state. The files named beside declarations are
// those of aie_api (include/aie_api/ of jgmelber/aie_api, commit 2b7eedf, 2026-07-01) that the
// signature was checked against.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

// The compiler for the array defines it: 20 is AIE2 (XDNA), 21 is AIE2P (XDNA2).
#ifndef __AIE_ARCH__
#error "expected __AIE_ARCH__ of 20 (XDNA) or 21 (XDNA2); give it with -D"
#elif __AIE_ARCH__ == 20
#define FLOWNPU_AIE_ARCHITECTURE xdna
#elif __AIE_ARCH__ == 21
#define FLOWNPU_AIE_ARCHITECTURE xdna2
#else
#error "expected __AIE_ARCH__ of 20 (XDNA) or 21 (XDNA2): the host models no other architecture"
#endif

// Trace events of the core, which kernels call first and last. On the host they do nothing.
inline void event0() {}
inline void event1() {}

// The two architectures differ in behaviour under the same names. An inline namespace keeps their
// code apart in a process with both.
namespace aie {
inline namespace FLOWNPU_AIE_ARCHITECTURE {

// aie_types.hpp, `enum class rounding_mode`: the modelled ones of its ten modes.
enum class rounding_mode { floor, symmetric_floor, conv_even };
// aie_types.hpp, `enum class saturation_mode`.
enum class saturation_mode { none, saturate };

namespace host {
// The control registers of a core as a kernel may find them. `floor`, the mode at power-up, is a
// bias: every conversion of an accumulator rounds towards minus infinity until the kernel says
// otherwise. Saturation is off at power-up, but aiecc turns it on in a core whose own body converts
// vectors: a kernel that relies on either must set it.
struct CoreState {
  rounding_mode rounding = rounding_mode::floor;
  saturation_mode saturation = saturation_mode::saturate;
};
inline thread_local CoreState core_state;
}  // namespace host

// aie.hpp, `set_rounding`, `swap_rounding`, `set_saturation`.
inline void set_rounding(rounding_mode mode) { host::core_state.rounding = mode; }
inline rounding_mode swap_rounding(rounding_mode mode) {
  const rounding_mode before = host::core_state.rounding;
  set_rounding(mode);
  return before;
}
inline void set_saturation(saturation_mode mode) { host::core_state.saturation = mode; }

namespace host {
// f32 to bf16: its 16 high bits, rounded. NaN stays NaN.
constexpr std::uint16_t round_to_bf16(float value, rounding_mode mode) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const bool negative = (bits >> 31) != 0;
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  switch (mode) {
    case rounding_mode::conv_even:
      return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
    case rounding_mode::floor:
      // The lower neighbour of a negative number is the one of larger magnitude.
      return static_cast<std::uint16_t>((bits + (negative ? 0xffffu : 0u)) >> 16);
    case rounding_mode::symmetric_floor:
      break;
  }
  return static_cast<std::uint16_t>(bits >> 16);
}

// Rounds a number to an integer.
inline float round_to_integer(float value, rounding_mode mode) {
  if (mode == rounding_mode::conv_even) return std::nearbyint(value);
  return mode == rounding_mode::floor ? std::floor(value) : std::trunc(value);
}
}  // namespace host
}  // namespace FLOWNPU_AIE_ARCHITECTURE
}  // namespace aie

inline namespace FLOWNPU_AIE_ARCHITECTURE {
// 8 bits of exponent, like f32, and 7 of mantissa. A constant is rounded by the compiler, to
// nearest even; a conversion at run time by the core's rounding mode.
struct bfloat16 {
  std::uint16_t bits = 0;

  constexpr bfloat16() = default;
  constexpr bfloat16(float value)  // NOLINT(google-explicit-constructor): as the built-in type
      : bits(aie::host::round_to_bf16(value, std::is_constant_evaluated()
                                                 ? aie::rounding_mode::conv_even
                                                 : aie::host::core_state.rounding)) {}
  constexpr operator float() const {  // NOLINT(google-explicit-constructor)
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }
};

// A 4-bit code. As in Peano (`unsigned _BitInt(4)`), sizeof is 1 and a pointer to it steps bytes:
// kernels walk over bytes and cast vectors (see mlir-aie's aie_kernels/quant/q4nx_dequant.cc).
enum class uint4 : std::uint8_t {};

// Eight values that share an exponent, in memory: value i = mantissa[i] 2^(exponent - 127 - 6)
// (mlir-aie python/utils/bfp.py). Only XDNA2 has it.
struct bfp16ebs8 {
  std::uint8_t exponent;
  std::int8_t mantissa[8];
};
static_assert(sizeof(bfp16ebs8) == 9);
}  // namespace FLOWNPU_AIE_ARCHITECTURE

// Accumulator tags (detail/accum.hpp). `accauto`: what a product of the operands' types needs.
struct accfloat {};
struct acc32 {};
struct accauto {};

namespace aie {
inline namespace FLOWNPU_AIE_ARCHITECTURE {
namespace host {
// Depends on a template argument, so that a static_assert fails only in a kernel that uses
// something that XDNA lacks.
template <typename>
inline constexpr bool is_xdna2 = __AIE_ARCH__ >= 21;

// The bits of an element in a vector; all but uint4 are whole bytes.
template <typename T>
inline constexpr unsigned bits_of = std::is_same_v<T, uint4> ? 4 : 8 * sizeof(T);
}  // namespace host
}  // namespace FLOWNPU_AIE_ARCHITECTURE
}  // namespace aie
