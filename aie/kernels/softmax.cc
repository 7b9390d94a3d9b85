// SPDX-License-Identifier: Apache-2.0
// Softmax of whole rows: for attention that no Flow kernel takes (the unfolded fallback).
//     y_i = e^(x_i - max x) / sum_j e^(x_j - max x)
//
// Dataflow: three passes over a row in L1, in f32 until y is rounded. Layout: lines(rows, stride),
// of which the first n columns are data. Caller: aie/designs/vector_operators.py.
#include "aie/kernels/common/float_math.h"
#include "aie/kernels/kernels.h"

namespace flownpu {
namespace {

constexpr float kLog2E = 1.44269504F;
constexpr float kLowest = -1e30F;

// Which of the 16 lanes from element i on are below n.
aie::mask<kLanes> below(unsigned n, unsigned i) {
  const unsigned lanes = n > i ? n - i : 0;
  return aie::mask<kLanes>::from_uint32(lanes >= kLanes ? 0xffffU : (1U << lanes) - 1U);
}

// e^(x - m) of 16 elements, 0 beyond n.
Float<kLanes> powers(const float* x, const Float<kLanes>& m, unsigned n, unsigned i) {
  const Float<kLanes> t = aie::sub(Float<kLanes>(aie::load_v<kLanes>(x + i)), m);
  const auto log2 = multiply(split(t), broadcast_parts<kLanes>(kLog2E)).to_vector<float>();
  return aie::select(aie::zeros<float, kLanes>(), power_of_two(log2), below(n, i));
}

void soften(const float* x, bfloat16* y, unsigned stride, unsigned n) {
  const auto lowest = aie::broadcast<float, kLanes>(kLowest);
  Float<kLanes> largest = lowest;
  for (unsigned i = 0; i < stride; i += kLanes) {
    const auto known = aie::select(lowest, Float<kLanes>(aie::load_v<kLanes>(x + i)), below(n, i));
    largest = aie::max(largest, known);
  }
  const auto m = aie::broadcast<float, kLanes>(aie::reduce_max(largest));

  Accumulator<kLanes> sums = aie::zeros<accfloat, kLanes>();
  for (unsigned i = 0; i < stride; i += kLanes) sums = aie::add(sums, powers(x, m, n, i));
  const auto inverse = broadcast_parts<kLanes>(aie::inv(aie::reduce_add(sums.to_vector<float>())));

  for (unsigned i = 0; i < stride; i += kLanes) {
    const auto normal = multiply(split(powers(x, m, n, i)), inverse);
    aie::store_v(y + i, normal.to_vector<bfloat16>());
  }
}

}  // namespace
}  // namespace flownpu

extern "C" {

void softmax(const float* __restrict x, bfloat16* __restrict y, std::int32_t rows,
             std::int32_t stride, std::int32_t n) {
  event0();
  flownpu::set_conversion_modes();
  for (std::int32_t row = 0; row < rows; ++row)
    flownpu::soften(x + row * stride, y + row * stride, stride, n);
  event1();
}

}  // extern "C"
