// SPDX-License-Identifier: Apache-2.0
// Kernels before and after a projection: they initialise its accumulators, and store the output
// computed from them.
//
// Dataflow: element by element, 16 lanes. Layout: any, the same for all buffers of a call.
// Callers: gemm.py, fused_dqp.py, patch_pooling.py and decode_layer/array.py in aie/designs/.
#include "aie/kernels/common/float_math.h"
#include "aie/kernels/kernels.h"

namespace flownpu {
namespace {

Accumulator<kLanes> load(const float* c) { return Accumulator<kLanes>(aie::load_v<kLanes>(c)); }

// y[i] = function(i), rounded to bf16.
template <typename Function>
void store(bfloat16* y, unsigned n, Function function) {
  event0();
  set_conversion_modes();
  AIE_PREPARE_FOR_PIPELINING
  for (unsigned i = 0; i < n; i += kLanes) {
    aie::store_v(y + i, function(i).template to_vector<bfloat16>());
  }
  event1();
}

}  // namespace
}  // namespace flownpu

using flownpu::kLanes;

extern "C" {

void zero_f32(float* __restrict c, std::int32_t n) {
  const auto zeros = aie::zeros<float, kLanes>();
  for (unsigned i = 0; i < static_cast<unsigned>(n); i += kLanes) aie::store_v(c + i, zeros);
}

void add_f32(const float* __restrict more, float* __restrict c, std::int32_t n) {
  for (unsigned i = 0; i < static_cast<unsigned>(n); i += kLanes) {
    aie::store_v(c + i, aie::add(aie::load_v<kLanes>(c + i), aie::load_v<kLanes>(more + i)));
  }
}

void store_bf16(const float* __restrict c, bfloat16* __restrict y, std::int32_t n) {
  flownpu::store(y, n, [=](unsigned i) { return flownpu::load(c + i); });
}

void store_gelu(const float* __restrict c, bfloat16* __restrict y, std::int32_t n) {
  flownpu::store(y, n, [=](unsigned i) { return flownpu::gelu(flownpu::load(c + i)); });
}

void store_gelu_mul(const float* __restrict gate, const float* __restrict up,
                    bfloat16* __restrict y, std::int32_t n) {
  flownpu::store(y, n, [=](unsigned i) {
    return flownpu::multiply(flownpu::split(flownpu::gelu(flownpu::load(gate + i))),
                             flownpu::split(flownpu::load(up + i)));
  });
}

void store_silu_mul(const float* __restrict gate, const float* __restrict up,
                    bfloat16* __restrict y, std::int32_t n) {
  flownpu::store(y, n, [=](unsigned i) {
    return flownpu::multiply(flownpu::split(flownpu::silu(flownpu::load(gate + i))),
                             flownpu::split(flownpu::load(up + i)));
  });
}

}  // extern "C"
