// SPDX-License-Identifier: Apache-2.0
// Definitions of words of the language in the language itself, for all dialects.
#pragma once

namespace flownpu::gpu {

inline constexpr const char* kWords = R"(
float from_bfloat16(ushort bits) { return as_float((uint)bits << 16); }
// To the nearest, ties to even; NaN stays NaN.
ushort to_bfloat16(float value) {
  const uint bits = as_uint(value);
  const uint rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return (ushort)(((bits & 0x7fffffffu) > 0x7f800000u ? (bits | 0x400000u) : rounded) >> 16);
}
// To the nearest number of float16, ties to even; below 2^-14 these are multiples of 2^-24.
float rounded_to_half(float value) {
  const uint bits = as_uint(fabs(value));
  const float normal = as_float((bits + 0xfffu + ((bits >> 13) & 1u)) & 0xffffe000u);
  const float small = (float)convert_int_rte(fmin(fabs(value), 1.0f) * 16777216.0f) * 5.9604645e-8f;
  const float magnitude = bits < 0x38800000u ? small : normal < 65536.0f ? normal : INFINITY;
  return isnan(value) ? value : value < 0.0f ? -magnitude : magnitude;
}
// The gate of experts (ExpertsShape); sigmoid by tanh, since exp would overflow. NaN stays NaN.
float limited_swiglu(float of_gate, float of_up, float alpha, float beta, float limit) {
  const float gate = of_gate > limit ? limit : of_gate;
  const float up = of_up > limit ? limit : of_up < -limit ? -limit : of_up;
  return 0.5f * gate * (1.0f + tanh(0.5f * alpha * gate)) * (up + beta);
}
// First pairs of bytes, then pairs of these pairs.
uint4 transposed(uint4 four) {
  const uint mask = 0x00ff00ffu;
  const uint2 first = (uint2)((four.x & mask) | ((four.y & mask) << 8),
                              ((four.x >> 8) & mask) | (four.y & ~mask));
  const uint2 second = (uint2)((four.z & mask) | ((four.w & mask) << 8),
                               ((four.z >> 8) & mask) | (four.w & ~mask));
  return (uint4)((first & 0xffffu) | (second << 16), (first >> 16) | (second & 0xffff0000u));
}
// Two pairs of columns of codes to one byte for each of the even rows, or with shift = 4 the odd.
uint8 nibbles(uint4 left, uint4 right, uint shift) {
  const uint mask = 0x0f0f0f0fu;
  return (uint8)(transposed(((uint4)(left.xz, right.xz) >> shift) & mask),
                 transposed(((uint4)(left.yw, right.yw) >> shift) & mask));
}
)";

}  // namespace flownpu::gpu
