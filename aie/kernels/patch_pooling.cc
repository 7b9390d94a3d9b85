// SPDX-License-Identifier: Apache-2.0
// Average pooling of image patches, the mean of a square of patches (4 x 4 of a 64 x 64 grid turn
// 4096 tokens into 256), with the RMS norm that follows it in Gemma3.
//
// Dataflow: each call of patch_pooling adds the patches of one line of the square to f32 sums; a
// last kernel normalises them. In mean / rms(mean) the number of patches cancels, except beside
// epsilon:
//     y = sum / sqrt(mean(sum^2) + patches^2 epsilon) weight.
// Layout: x lines(patches, n), sums f32[n]. Caller: aie/designs/patch_pooling.py.
#include "aie/kernels/common/float_math.h"
#include "aie/kernels/kernels.h"

using namespace flownpu;

extern "C" {

void patch_pooling(const bfloat16* __restrict x, float* __restrict sum, std::int32_t patches,
                   std::int32_t n) {
  event0();
  for (std::int32_t i = 0; i < n; i += kLanes) {
    Accumulator<kLanes> total(aie::load_v<kLanes>(sum + i));
    for (std::int32_t patch = 0; patch < patches; ++patch) {
      total = aie::add(total, aie::load_v<kLanes>(x + patch * n + i));
    }
    aie::store_v(sum + i, total.to_vector<float>());
  }
  event1();
}

void patch_pooling_norm(const float* __restrict sum, const bfloat16* __restrict weight,
                        bfloat16* __restrict y, std::int32_t n, std::int32_t patches,
                        std::int32_t epsilon) {
  event0();
  set_conversion_modes();
  Accumulator<kLanes> squares = aie::zeros<accfloat, kLanes>();
  for (std::int32_t i = 0; i < n; i += kLanes) {
    const auto total = split(Float<kLanes>(aie::load_v<kLanes>(sum + i)));
    squares = multiply_add(squares, total, total);
  }
  const auto count = static_cast<float>(patches);
  const float mean = aie::reduce_add(squares.to_vector<float>()) * aie::inv(static_cast<float>(n));
  const auto inverse =
      broadcast_parts<kLanes>(aie::invsqrt(mean + count * count * float_of(epsilon)));
  for (std::int32_t i = 0; i < n; i += kLanes) {
    const Float<kLanes> total = aie::load_v<kLanes>(sum + i);
    const auto normal = split(multiply(split(total), inverse));
    const Bf16<kLanes> scale = aie::load_v<kLanes>(weight + i);
    aie::store_v(y + i, multiply(normal, scale).to_vector<bfloat16>());
  }
  event1();
}

}  // extern "C"
