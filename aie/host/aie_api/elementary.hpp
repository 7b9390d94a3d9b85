// SPDX-License-Identifier: Apache-2.0
// Conversion to float, reciprocals, and the transcendental instructions of XDNA2.
#pragma once

#include "operations.hpp"

namespace aie {
inline namespace FLOWNPU_AIE_ARCHITECTURE {
namespace host {
// The accuracy of the scalar unit's inv and invsqrt is not published. The host drops the 8 lowest
// bits of the exact result (a relative error of up to 2^-15), so that no test relies on more
// accuracy.
inline float drop_low_bits(double exact) {
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(static_cast<float>(exact)) & ~0xffU);
}
}  // namespace host

// aie.hpp, `inv` and `invsqrt` of a scalar: one instruction each on AIE2P. On AIE2 they are
// `1.0f / a` and `1.0f / std::sqrt(a)`, calls of `__divsf3` and `sqrtf`: hundreds of cycles and
// some KB of program memory, where a kernel must not call them for each vector. (The vector forms
// loop over lanes.)
inline float inv(float a) { return host::drop_low_bits(1.0 / a); }
inline float invsqrt(float a) {
  return host::drop_low_bits(1.0 / std::sqrt(static_cast<double>(a)));
}

// aie.hpp, `to_float(const Vec&, int shift)`. Exact for these types.
template <typename T, unsigned N>
  requires host::is_one_of<T, std::uint8_t, std::int8_t, std::int16_t, std::uint16_t, std::int32_t>
vector<float, N> to_float(const vector<T, N>& v) {
  static_assert(
      N == 16 || N == 32 || N == 64,
      "expected 16, 32 or 64 elements (detail/aie2/elementary.hpp fills no other length)");
  return host::generate<N>([&](unsigned i) { return static_cast<float>(v.data()[i]); });
}

// aie.hpp, `exp2` and `tanh`: instructions of XDNA2 that give bf16; XDNA has neither.
//
// 2^x is 2^floor(x) (1 + frac(x)), up to 6.15 % too large: the linear interpolant that mlir-aie
// (aie_kernels/common/exp2_bf16.h) and amd/IRON report. They also report errors of "49 % on [-100,
// 0]", which an argument truncated to bf16 explains (2^0.5 x 1.0615), so truncation is modelled
// too. No kernel of ours uses exp2 or tanh: softmax and activations are polynomials
// (aie/kernels/common/float_math.h).
template <typename T = bfloat16, unsigned N>
vector<T, N> exp2(const vector<float, N>& v) {
  static_assert(host::is_xdna2<T>, "XDNA has no exp2 instruction; use a polynomial");
  static_assert(std::is_same_v<T, bfloat16>, "exp2 of XDNA2 gives bfloat16");
  return host::generate<N>([&](unsigned i) {
    bfloat16 argument;
    argument.bits = host::round_to_bf16(v.data()[i], rounding_mode::symmetric_floor);
    const float whole = std::floor(float(argument));
    bfloat16 power;
    power.bits =
        host::round_to_bf16(std::ldexp(1.0F + (float(argument) - whole), static_cast<int>(whole)),
                            host::core_state.rounding);
    return power;
  });
}
// tanh returns x itself for |x| <= 1/2 (mlir-aie, aie_kernels/common/activations.h), an error of up
// to 0.038 there; its values for larger |x| are not published. The host joins (1/2, 1/2) to (2, 1)
// by a line, then is flat: an error of up to 0.1, so that no test relies on more accuracy.
template <typename T = bfloat16, unsigned N>
vector<T, N> tanh(const vector<float, N>& v) {
  static_assert(host::is_xdna2<T>, "XDNA has no tanh instruction; use a polynomial");
  static_assert(std::is_same_v<T, bfloat16>, "tanh of XDNA2 is modelled for bfloat16");
  return host::generate<N>([&](unsigned i) {
    const float magnitude = std::fabs(v.data()[i]);
    const float line = magnitude <= 0.5F ? magnitude : 0.5F + (magnitude - 0.5F) / 3.0F;
    bfloat16 result;
    result.bits = host::round_to_bf16(std::copysign(line < 1.0F ? line : 1.0F, v.data()[i]),
                                      host::core_state.rounding);
    return result;
  });
}

}  // namespace FLOWNPU_AIE_ARCHITECTURE
}  // namespace aie
