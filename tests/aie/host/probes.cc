// SPDX-License-Identifier: Apache-2.0
// Kernels that each use one feature of aie/host/, so that tests check it by itself.
#include <aie_api/aie.hpp>

#include "aie/host/make_kernel.h"
#include "aie/kernels/common/float_math.h"

namespace {

aie::rounding_mode mode_of(std::int32_t mode) {
  return mode == 0
             ? aie::rounding_mode::floor
             : (mode == 1 ? aie::rounding_mode::conv_even : aie::rounding_mode::symmetric_floor);
}

// f32 to bf16. Mode: 0 floor, 1 conv_even, 2 symmetric_floor, 3 the one that a core powers up in.
void round_bf16(const float* x, bfloat16* y, std::int32_t mode) {
  if (mode != 3) aie::set_rounding(mode_of(mode));
  aie::store_v(y, aie::accum<accfloat, 16>(aie::load_v<16>(x)).to_vector<bfloat16>());
}

// int32 to int32 and to uint8, shifted right.
void shift_round(const std::int32_t* x, std::int32_t* y, std::uint8_t* narrow, std::int32_t shift,
                 std::int32_t mode, std::int32_t saturate) {
  aie::set_rounding(mode_of(mode));
  aie::set_saturation(saturate != 0 ? aie::saturation_mode::saturate : aie::saturation_mode::none);
  const aie::accum<acc32, 16> acc(aie::load_v<16>(x));
  aie::store_v(y, acc.to_vector<std::int32_t>(shift));
  aie::store_v(narrow, acc.to_vector<std::uint8_t>(shift));
}

void shift_up(const std::int32_t* x, std::int32_t* y, std::int32_t shift, std::int32_t saturate) {
  if (saturate == 0) aie::set_saturation(aie::saturation_mode::none);
  aie::store_v(y, aie::upshift(aie::load_v<16>(x), static_cast<unsigned>(shift)));
}

void copy16(const float* x, float* y, std::int32_t from, std::int32_t to) {
  aie::store_v(y + to, aie::load_v<16>(x + from));
}

void write_input(const float* x) { aie::store_v(const_cast<float*>(x), aie::zeros<float, 16>()); }

void take_part(const float* x, float* y, std::int32_t part) {
  aie::store_v(y, aie::load_v<16>(x).extract<8>(part));
}

void reciprocals(const float* x, float* y) {
  const auto v = aie::load_v<16>(x);
  aie::vector<float, 16> inverse;
  aie::vector<float, 16> inverse_root;
  for (unsigned i = 0; i < 16; ++i) {
    inverse.set(aie::inv(v.get(i)), i);
    inverse_root.set(aie::invsqrt(v.get(i)), i);
  }
  aie::store_v(y, inverse);
  aie::store_v(y + 16, inverse_root);
}

// Rearrangements of x[0 .. 31]: transpose 4 x 8, filter_even by 2, filter_odd, and a zip by 4 with
// x[32 .. 63].
void rearrange(const float* x, float* y) {
  const auto v = aie::load_v<32>(x);
  aie::store_v(y, aie::transpose(v, 4, 8));
  aie::store_v(y + 32, aie::concat(aie::filter_even(v, 2), aie::filter_odd(v)));
  const auto [low, high] = aie::interleave_zip(v, aie::load_v<32>(x + 32), 4);
  aie::store_v(y + 64, low);
  aie::store_v(y + 96, high);
}

void unpack_codes(const std::uint8_t* x, float* y) {
  aie::store_v(y, aie::to_float(aie::load_v<32>(x).cast_to<uint4>().unpack()));
}

// c = a b, all row-major.
void mmul_4x8x4(const bfloat16* a, const bfloat16* b, float* c) {
  aie::mmul<4, 8, 4, bfloat16, bfloat16> product;
  product.mul(aie::load_v<32>(a), aie::load_v<32>(b));
  aie::store_v(c, product.to_vector<float>());
}

// aie/kernels/common/float_math.h, in f32: 2^x, 2^x as exact as a bf16 needs it, and 1/x.
void powers_of_two(const float* x, float* y) {
  flownpu::set_conversion_modes();
  aie::store_v(y, flownpu::power_of_two<16>(aie::load_v<16>(x)));
}
void rough_powers_of_two(const float* x, float* y) {
  flownpu::set_conversion_modes();
  const flownpu::Accumulator<16> value(aie::load_v<16>(x));
  aie::store_v(y, flownpu::rough_power_of_two(value));
}
void reciprocals_by_newton(const float* x, float* y) {
  flownpu::set_conversion_modes();
  const flownpu::Accumulator<16> value(aie::load_v<16>(x));
  aie::store_v(y, flownpu::reciprocal(value).to_vector<float>());
}

#if __AIE_ARCH__ >= 21
void exp2_native(const float* x, bfloat16* y) {
  aie::store_v(y, aie::exp2<bfloat16>(aie::load_v<16>(x)));
}
void tanh_native(const float* x, bfloat16* y) {
  aie::store_v(y, aie::tanh<bfloat16>(aie::load_v<16>(x)));
}
void to_blocks(const float* x, bfp16ebs8* y, std::int32_t mode) {
  aie::set_rounding(mode_of(mode));
  aie::block_vector_output_buffer_stream<bfp16ebs8, 64> stream(y);
  stream.push(aie::accum<accfloat, 64>(aie::load_v<64>(x)).to_vector<bfp16ebs8>());
}
// b is [n][k], as the instruction takes it.
void mmul_blocks(const bfp16ebs8* a, const bfp16ebs8* b, float* c) {
  aie::mmul<8, 8, 8, bfp16ebs8, bfp16ebs8> product;
  aie::block_vector_input_buffer_stream<bfp16ebs8, 64> left(a);
  aie::block_vector_input_buffer_stream<bfp16ebs8, 64> right(b);
  product.mul(left.pop(), aie::op_transpose(right.pop()));
  aie::store_v(c, product.to_vector<float>());
}
#endif

constexpr flownpu::aie_host::Kernel kProbes[] = {
    FLOWNPU_KERNEL(round_bf16),
    FLOWNPU_KERNEL(shift_round),
    FLOWNPU_KERNEL(shift_up),
    FLOWNPU_KERNEL(copy16),
    FLOWNPU_KERNEL(write_input),
    FLOWNPU_KERNEL(take_part),
    FLOWNPU_KERNEL(reciprocals),
    FLOWNPU_KERNEL(rearrange),
    FLOWNPU_KERNEL(unpack_codes),
    FLOWNPU_KERNEL(mmul_4x8x4),
    FLOWNPU_KERNEL(powers_of_two),
    FLOWNPU_KERNEL(rough_powers_of_two),
    FLOWNPU_KERNEL(reciprocals_by_newton),
#if __AIE_ARCH__ >= 21
    FLOWNPU_KERNEL(exp2_native),
    FLOWNPU_KERNEL(tanh_native),
    FLOWNPU_KERNEL(to_blocks),
    FLOWNPU_KERNEL(mmul_blocks),
#endif
};

}  // namespace

FLOWNPU_EXPORT_KERNELS(kProbes)
