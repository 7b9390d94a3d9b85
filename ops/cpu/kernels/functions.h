// SPDX-License-Identifier: Apache-2.0
// Functions of one vector. Each is NaN where its argument is, and has the function's limits at
// infinities. Polynomials without another source have the least largest error, found by Lawson's
// algorithm; the comments say how large it is. tests/ops/cpu/test_functions.py checks the sums of
// these errors and of the roundings.
#pragma once

#include <cmath>
#include <limits>

#include "ops/cpu/kernels.h"
#include "ops/cpu/kernels/vector.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// c[0] + c[1] x + c[2] x^2 + ..
template <int COUNT>
inline Vector polynomial(Vector x, const float (&c)[COUNT]) {
  Vector y = broadcast(c[COUNT - 1]);
  for (int i = COUNT - 2; i >= 0; --i) y = y * x + c[i];
  return y;
}

inline Vector with_sign_of(Vector sign, Vector v) {
  constexpr std::uint32_t kSign = 0x80000000U;
  return reinterpret_cast<Vector>(reinterpret_cast<Bits>(v) ^
                                  (reinterpret_cast<Bits>(sign) & kSign));
}

// e^x: x = n ln 2 + r with |r| <= ln 2 / 2, e^r by its Taylor polynomial of degree 7 (the next term
// is (ln 2 / 2)^8 / 8! = 5e-9, below half an ulp of 1: 6e-8), times 2^n. ln 2 is split in two so
// that n * high is exact.
//
// 2^n is a float whose exponent bits are n + 127. 127 is part of what is added to round, so that n
// + 127 stands in the low bits of the sum, and shifting them up leaves nothing else. n = -127 makes
// it 0 and n = 128 infinity: so e^x is 0 below -126.5 ln 2 = -87.68, where it leaves the normal
// range, and infinity above 127.5 ln 2 = 88.38. NaN stays NaN: a comparison with it is false, so
// the constants are the first arguments.
inline Vector exp(Vector x) {
  constexpr float kLog2E = 1.44269504F;
  constexpr float kLn2High = 0.693359375F;
  constexpr float kLn2Low = -2.12194440e-4F;
  // At these ends n is -127 and 128.
  constexpr float kSmallest = -88.0F;
  constexpr float kLargest = 88.7F;
  const Vector magic = broadcast(12582912.0F + 127.0F);
  x = min(broadcast(kLargest), max(broadcast(kSmallest), x));
  const Vector shifted = x * kLog2E + magic;
  const Vector n = shifted - magic;
  const Vector r = (x - n * kLn2High) - n * kLn2Low;
  const Vector y =
      polynomial(r, {1.0F, 1.0F, 0.5F, 1.0F / 6, 1.0F / 24, 1.0F / 120, 1.0F / 720, 1.0F / 5040});
  return y * reinterpret_cast<Vector>(reinterpret_cast<Bits>(shifted) << 23);
}

// The natural logarithm: x = 2^n (1 + f) with 1 + f in [sqrt(1/2), sqrt 2), ln x = n ln 2 + f - f^2
// / 2 + f^3 p(f). The error of p is 6e-9 of ln(1 + f). ln 2 is split as for e^x.
inline Vector log(Vector x) {
  constexpr float kSmallestNormal = 0x1p-126F;
  constexpr std::uint32_t kRootHalf = 0x3f3504f3;  // the bits of sqrt(1/2)
  const Integers is_small = x < kSmallestNormal;
  const auto bits = reinterpret_cast<Bits>(select(is_small, x * 0x1p24F, x));
  const Integers exponent = reinterpret_cast<Integers>(bits - kRootHalf) >> 23;
  const Vector f = reinterpret_cast<Vector>(bits - (reinterpret_cast<Bits>(exponent) << 23)) - 1.0F;
  const Vector n = __builtin_convertvector(exponent - (is_small & 24), Vector);
  const Vector p = polynomial(f, {0.333333313F, -0.250008196F, 0.200012267F, -0.166233569F,
                                  0.142017588F, -0.131601825F, 0.12761575F, -0.0763449296F});
  const Vector y = n * 0.693359375F + (f + (f * f * (f * p - 0.5F) - n * 2.12194440e-4F));
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  const Vector end = select(x == 0.0F, broadcast(-kInfinity), broadcast(kNaN));
  return select(x > 0.0F, select(x < kInfinity, y, x), end);
}

// tanh x = x + x^3 p(x^2) up to 0.55, where the error of p is 1e-9 of x; beyond, sign(x) (1 - 2 /
// (1
// + e^(2 |x|))).
inline Vector tanh(Vector x) {
  const Vector square = x * x;
  const Vector near = x + x * square *
                              polynomial(square, {-0.333333194F, 0.133326024F, -0.0538538583F,
                                                  0.0210777577F, -0.00628247298F});
  const Vector far = 1.0F - 2.0F / (1.0F + exp(2.0F * magnitude(x)));
  return select(magnitude(x) < 0.55F, near, with_sign_of(x, far));
}

// erf x = x p(x^2) up to 0.93, where the error of p is 2e-8; beyond, sign(x) (1 - e^-q(|x|)), where
// the error of q is 2e-9 of erf. From 4 on erf x rounds to 1.
inline Vector erf(Vector x) {
  const Vector near = x * polynomial(x * x, {1.12837911F, -0.376124948F, 0.112818025F,
                                             -0.0267655682F, 0.00499098096F, -0.000597689592F});
  const Vector far =
      1.0F - exp(-polynomial(min(broadcast(4.0F), magnitude(x)),
                             {0.000166447164F, 1.12779725F, 0.636976063F, 0.104113683F,
                              -0.0223152153F, 0.00306549086F, -0.000198219728F}));
  return select(magnitude(x) < 0.93F, near, with_sign_of(x, far));
}

// GELU: x / 2 (1 + erf(x / sqrt 2)) = max(x, 0) - |x| / 2 e^-q(|x|), where the error of q is 2.3e-8
// of erf. From 14 on e^-q is 0. Minus infinity becomes NaN, as in ONNX's definition, which
// multiplies it by 0.
inline Vector gelu(Vector x) {
  const Vector a = min(broadcast(14.0F), magnitude(x));
  const Vector q =
      a * polynomial(a, {0.797885299F, 0.318298876F, 0.0363875777F, -0.00489598978F,
                         9.49170426e-05F, 0.000129050313F, -2.72945363e-05F, 1.96501173e-06F});
  return max(Vector{}, x) + (0.0F * min(Vector{}, x) - 0.5F * a * exp(-q));
}

// GELU with the tanh of Hendrycks and Gimpel: x / 2 (1 + tanh u), u = sqrt(2 / pi) (x + 0.044715
// x^3), which is x / (1 + e^(-2 u)): (1 + tanh u) / 2 is the logistic function of 2 u.
inline Vector gelu_tanh(Vector x) {
  constexpr float kMinusTwoSqrtTwoOverPi = -1.59576912F;
  return x / (1.0F + exp(kMinusTwoSqrtTwoOverPi * (x + 0.044715F * x * x * x)));
}

inline Vector sqrt(Vector x) {
#if defined(__AVX512F__)
  return _mm512_sqrt_ps(x);
#elif defined(__AVX2__)
  return _mm256_sqrt_ps(x);
#elif defined(__x86_64__)
  return _mm_sqrt_ps(x);
#elif defined(__aarch64__)
  return vsqrtq_f32(x);
#else
  for (int i = 0; i < kLanes; ++i) x[i] = std::sqrt(x[i]);
  return x;
#endif
}

// x - n pi / 2. The first 33 bits of pi / 2 times an n of 20 bits are exact in double, and so is
// the difference from x; the other bits are below 2^-53 of n pi / 2.
inline Vector subtract_right_angles(Vector x, Vector n) {
  constexpr double kHigh = 0x1.921fb544p+0;
  constexpr double kLow = 0x1.0b4611a626331p-34;
  const TwoDoubles wide = to_doubles(x);
  const TwoDoubles angles = to_doubles(n);
  return from_doubles({(wide.first - angles.first * kHigh) - angles.first * kLow,
                       (wide.second - angles.second * kHigh) - angles.second * kLow});
}

// The sine of x + turns pi / 2: with the whole number n of right angles next to x, and r what is
// left, by sin r = r + r^3 p(r^2) or cos r = 1 - r^2 / 2 + r^4 q(r^2), whose errors are 8e-9 of r
// and 3e-10, since |r| <= 0.86. n is exact to half, and what float may add for |x| below 2^20.
inline Vector sine(Vector x, std::int32_t turns) {
  constexpr float kLimit = 0x1p20F;
  const Integers is_large = magnitude(x) >= kLimit;
  const Vector n = round_to_integer(select(is_large, Vector{}, x) * 0.636619772F);
  const Vector r = subtract_right_angles(x, n);
  const Vector square = r * r;
  const Vector sin =
      r + r * square * polynomial(square, {-0.166666463F, 0.00833167601F, -0.000194534354F});
  const Vector cos =
      1.0F - 0.5F * square +
      square * square * polynomial(square, {0.0416666344F, -0.00138867064F, 0.000024366801F});
  const Integers quarter = __builtin_convertvector(n, Integers) + turns;
  Vector y = select((quarter & 1) != 0, cos, sin);
  y = select((quarter & 2) != 0, -y, y);
  // Rare, and NaN for infinity.
  for (int i = 0; i < kLanes; ++i) {
    if (is_large[i] != 0) y[i] = turns == 0 ? std::sin(x[i]) : std::cos(x[i]);
  }
  return y;
}

template <Function FUNCTION>
inline Vector apply(Vector x) {
  if constexpr (FUNCTION == Function::kAbs) return magnitude(x);
  if constexpr (FUNCTION == Function::kCos) return sine(x, 1);
  if constexpr (FUNCTION == Function::kErf) return erf(x);
  if constexpr (FUNCTION == Function::kExp) return exp(x);
  if constexpr (FUNCTION == Function::kGelu) return gelu(x);
  if constexpr (FUNCTION == Function::kGeluTanh) return gelu_tanh(x);
  if constexpr (FUNCTION == Function::kLog) return log(x);
  if constexpr (FUNCTION == Function::kNeg) return -x;
  if constexpr (FUNCTION == Function::kReciprocal) return 1.0F / x;
  if constexpr (FUNCTION == Function::kRelu) return max(Vector{}, x);
  if constexpr (FUNCTION == Function::kSigmoid) return 1.0F / (1.0F + exp(-x));
  if constexpr (FUNCTION == Function::kSin) return sine(x, 0);
  if constexpr (FUNCTION == Function::kSqrt) return sqrt(x);
  if constexpr (FUNCTION == Function::kTanh) return tanh(x);
  return x;
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
