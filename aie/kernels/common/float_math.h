// SPDX-License-Identifier: Apache-2.0
// f32 arithmetic on a core that multiplies bf16: an f32 is split into bf16 parts, whose products
// are exact in an f32 accumulator. All of it needs conv_even rounding, with which a part (8 bits)
// leaves a remainder of at most 2^-8 of the value; with floor the remainder is up to twice that and
// always positive, a bias.
#pragma once

#include <aie_api/aie.hpp>
#include <cstdint>

#include "aie/kernels/common/loops.h"
#include "aie/kernels/common/modes.h"

namespace flownpu {

template <unsigned N>
using Bf16 = aie::vector<bfloat16, N>;
template <unsigned N>
using Float = aie::vector<float, N>;
template <unsigned N>
using Accumulator = aie::accum<accfloat, N>;

// Lanes of the kernels that walk over a vector: 16 f32 fill a 512-bit register.
inline constexpr unsigned kLanes = 16;

// value = high + low, to within 2^-16 of it.
template <unsigned N>
struct Parts {
  Bf16<N> high, low;
};
template <unsigned N>
Parts<N> split(const Accumulator<N>& value) {
  const Bf16<N> high = value.template to_vector<bfloat16>();
  // A product with 1 is one instruction, while a subtraction would convert `high` back first.
  const auto ones = aie::broadcast<bfloat16, N>(bfloat16(1.0F));
  return {high, aie::msc(value, high, ones).template to_vector<bfloat16>()};
}
template <unsigned N>
Parts<N> split(const Float<N>& value) {
  return split(Accumulator<N>(value));
}
// The parts of one number, in all lanes.
template <unsigned N>
Parts<N> broadcast_parts(float value) {
  return split(aie::broadcast<float, N>(value));
}

// a b, to within 3 x 2^-16 of it: low x low and the remainders of both operands are left out.
template <unsigned N>
Accumulator<N> multiply(const Parts<N>& a, const Parts<N>& b) {
  Accumulator<N> product = aie::mul(a.high, b.high);
  product = aie::mac(product, a.high, b.low);
  return aie::mac(product, a.low, b.high);
}
template <unsigned N>
Accumulator<N> multiply(const Parts<N>& a, const Bf16<N>& b) {
  return aie::mac(aie::mul(a.high, b), a.low, b);
}
// sum + a b
template <unsigned N>
Accumulator<N> multiply_add(const Accumulator<N>& sum, const Parts<N>& a, const Parts<N>& b) {
  Accumulator<N> total = aie::mac(sum, a.high, b.high);
  total = aie::mac(total, a.high, b.low);
  return aie::mac(total, a.low, b.high);
}
// sum - a b
template <unsigned N>
Accumulator<N> multiply_subtract(const Accumulator<N>& sum, const Parts<N>& a, const Parts<N>& b) {
  Accumulator<N> total = aie::msc(sum, a.high, b.high);
  total = aie::msc(total, a.high, b.low);
  return aie::msc(total, a.low, b.high);
}
template <unsigned N>
Accumulator<N> constant(float value) {
  return Accumulator<N>(aie::broadcast<float, N>(value));
}

// value 2^k, exactly: three parts hold all 24 bits of an f32, and a power of two is a bf16.
template <unsigned N>
Accumulator<N> multiply_by_power(const Accumulator<N>& value, const Bf16<N>& power) {
  const Bf16<N> high = value.template to_vector<bfloat16>();
  const Accumulator<N> rest = aie::sub(value, high);
  const Bf16<N> middle = rest.template to_vector<bfloat16>();
  const Bf16<N> low = aie::sub(rest, middle).template to_vector<bfloat16>();
  return aie::mac(aie::mac(aie::mul(low, power), middle, power), high, power);
}

// 1.5 x 2^23: adding it to |x| < 2^22 leaves x, rounded to an integer, in the sum's low bits.
inline constexpr float kRounder = 12582912.0F;
inline constexpr std::int32_t kExponentBit = 23;
inline constexpr std::int32_t kExponentBias = 127;
// 2^-126 is the smallest normal f32.
inline constexpr float kLowestExponent = -126.0F;

// 2^k for the integers k that `with_rounder` = k + kRounder holds, -126 <= k <= 127: k + 127
// becomes the exponent (kRounder's own low 9 bits are 0, and its others are shifted out, for which
// saturation must be off: modes.h).
template <unsigned N>
Float<N> power_of_integer(const Float<N>& with_rounder) {
  const auto bits = with_rounder.template cast_to<std::int32_t>();
  const auto biased = aie::add(bits, aie::broadcast<std::int32_t, N>(kExponentBias));
  return aie::upshift(biased, kExponentBit).template cast_to<float>();
}

// 2^k v for v of [1/2, 2), `whole` = k + kRounder, where it is a normal number: v's exponent grows.
template <unsigned N>
Float<N> raise_by_integer(const Accumulator<N>& v, const aie::vector<std::int32_t, N>& whole) {
  const auto bits = v.template to_vector<float>().template cast_to<std::int32_t>();
  return aie::add(bits, aie::upshift(whole, kExponentBit)).template cast_to<float>();
}

// 2^x for x <= 127, to within 2^-14 of it; below -126 it is 2^-126.
//
// x = k + f, |f| <= 1/2. 2^f is the minimax polynomial of degree 4 (relative error 2.6e-6, found by
// Remez' exchange). Each of Horner's last two steps errs by 3 x 2^-16 of the product it adds; these
// are at most 0.41 and 0.09 of the sum: 2.3e-5. The step before them rounds its factor, at most
// 0.061, to bf16: 2^-9 of it, times f^3, 1.8e-5. What splitting leaves of f, 2^-16 of at most 1/2,
// adds 0.5e-5 and half of that again for the sum's slope. Together 5.2e-5.
template <unsigned N>
Float<N> power_of_two(const Float<N>& x) {
  const Float<N> limited = aie::max(x, aie::broadcast<float, N>(kLowestExponent));
  const Float<N> rounder = aie::broadcast<float, N>(kRounder);
  const Float<N> whole = aie::add(limited, rounder);
  const auto fraction = split(Accumulator<N>(aie::sub(limited, aie::sub(whole, rounder))));
  const auto highest = aie::broadcast<bfloat16, N>(bfloat16(9.57010191e-03F));
  Accumulator<N> sum = aie::mac(constant<N>(5.59178603e-02F), fraction.high, highest);
  const Bf16<N> third = sum.template to_vector<bfloat16>();
  sum = aie::mac(aie::mac(constant<N>(2.40247448e-01F), fraction.high, third), fraction.low, third);
  sum = multiply_add(constant<N>(6.93121815e-01F), split(sum), fraction);
  sum = multiply_add(constant<N>(9.99999261e-01F), split(sum), fraction);
  return raise_by_integer(sum, whole.template cast_to<std::int32_t>());
}

// 2^x for -2^22 < x <= 127, to within 2^-10 of it: for results that are rounded to bf16 next, an
// error of 2^-8. Below -126 it is less than 2^-125. x is not compared as f32, which is emulated: k
// + kRounder is positive, so that its bits order as integers do.
//
// 2^f is a polynomial of degree 3 (7.5e-5 at most, as above), in two halves that do not wait for
// one another, c0 + c1 f and f^2 (c2 + c3 f): 31 instructions in a chain of 26 cycles after f,
// where Horner's rule has 41 in 100. Both factors of the second half, at most 1/4 and 0.27, are
// rounded to bf16, 1.3e-4 each, and f^2 leaves out f's low part, 2 x 2^-10 f c2, 2.4e-4.
// Together 5.8e-4, of a sum of 0.7 or more.
template <unsigned N>
Float<N> rough_power_of_two(const Accumulator<N>& x) {
  const Float<N> rounder = aie::broadcast<float, N>(kRounder);
  const Accumulator<N> whole = aie::add(x, rounder);
  const Parts<N> f = split(aie::sub(x, aie::sub(whole, rounder).template to_vector<float>()));
  const auto slope = broadcast_parts<N>(6.93260985e-01F);
  const auto third = aie::broadcast<bfloat16, N>(bfloat16(5.51716691e-02F));
  const Bf16<N> square = aie::mul(f.high, f.high).template to_vector<bfloat16>();
  const Bf16<N> curve =
      aie::mac(constant<N>(2.42611122e-01F), f.high, third).template to_vector<bfloat16>();
  const Accumulator<N> line = multiply_add(constant<N>(9.99928074e-01F), f, slope);
  constexpr auto kLowestWhole = __builtin_bit_cast(std::int32_t, kRounder + kLowestExponent);
  const auto bits = whole.template to_vector<float>().template cast_to<std::int32_t>();
  return raise_by_integer(aie::mac(line, square, curve),
                          aie::max(bits, aie::broadcast<std::int32_t, N>(kLowestWhole)));
}

// 1 / x for 2^-60 <= x <= 2^61, to within 1e-4 of it.
//
// The seed negates the exponent: bits(1/x) is about 2 bits(1) - bits(x); with the constant that
// halves the error it is off by at most 12.5 %. A Newton step r (2 - x r) squares the relative
// error: 1.6e-2, 2.4e-4, 6e-8; the two products of the last step err by 3 x 2^-16 each.
template <unsigned N>
Accumulator<N> reciprocal(const Accumulator<N>& x) {
  constexpr std::int32_t kSeed = 0x7ef311c3;
  const auto bits = x.template to_vector<float>().template cast_to<std::int32_t>();
  const auto seed = aie::sub(aie::broadcast<std::int32_t, N>(kSeed), bits);
  Accumulator<N> inverse(seed.template cast_to<float>());
  const Parts<N> divisor = split(x);
  AIE_LOOP_UNROLL_FULL
  for (unsigned step = 0; step < 3; ++step) {
    const Parts<N> estimate = split(inverse);
    inverse = multiply(estimate, split(multiply_subtract(constant<N>(2.0F), divisor, estimate)));
  }
  return inverse;
}

// 1 / (1 + e^-x). -x log2(e) is limited to 60, where the result is 2^-60.
template <unsigned N>
Accumulator<N> sigmoid(const Accumulator<N>& x) {
  const Accumulator<N> power = multiply(split(x), broadcast_parts<N>(-1.44269504F));
  const Float<N> limited =
      aie::min(power.template to_vector<float>(), aie::broadcast<float, N>(60.0F));
  return reciprocal(aie::add(constant<N>(1.0F), power_of_two(limited)));
}

// tanh(x), given power = -2 log2(e) x, to within 4e-4 of it and 1e-6: (1 - e) / (1 + e), e =
// 2^power.
//
// e errs by 5.2e-5 of itself, which is at most 2.5 x (1 - e) where it is not near 1, and near it by
// 7e-7 and 6e-5 of 1 - e; the quotient by 1e-4 for the reciprocal and 3 x 2^-16 for the product.
// The power is limited to 60, where the result is -1.
template <unsigned N>
Accumulator<N> tanh_of_power(const Accumulator<N>& power) {
  const Float<N> limited =
      aie::min(power.template to_vector<float>(), aie::broadcast<float, N>(60.0F));
  const Float<N> e = power_of_two(limited);
  const auto one = constant<N>(1.0F);
  return multiply(split(aie::sub(one, e)), split(reciprocal(aie::add(one, e))));
}

// SiLU(x) = x sigmoid(x).
template <unsigned N>
Accumulator<N> silu(const Accumulator<N>& x) {
  return multiply(split(x), split(sigmoid(x)));
}
// GELU, the tanh approximation: x/2 (1 + tanh u) = x sigmoid(2 u), u = sqrt(2/pi) (x + 0.044715
// x^3). 2 sqrt(2/pi) = 1.59576912; times 0.044715 it is 0.0713548163. |x| < 2^40, so that x^3 is
// finite.
template <unsigned N>
Accumulator<N> gelu(const Accumulator<N>& x) {
  const Parts<N> parts = split(x);
  const Parts<N> square = split(multiply(parts, parts));
  const Accumulator<N> factor =
      multiply_add(constant<N>(1.59576912F), square, broadcast_parts<N>(0.0713548163F));
  return multiply(parts, split(sigmoid(multiply(parts, split(factor)))));
}

// The float that a run-time parameter's word holds.
inline float float_of(std::int32_t bits) { return __builtin_bit_cast(float, bits); }
}  // namespace flownpu
