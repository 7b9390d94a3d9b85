// SPDX-License-Identifier: Apache-2.0
// The dequantisation engine's kernel (Gemma3 on NPU, section 3.1.1, eq. 3): one Q4NX block, or the
// two of a weight of 8 bits, to one panel of a GEMM's right operand.
//
// Dataflow: 64 bytes hold 16 rows x 8 columns; their halves are two sub-tiles of 8 features x 8 k.
// Planes are added up in f32. Layout: block as in common/q4nx.h -> panels(256, 32):
// [k/8][feature/8][8 x 8], where a sub-tile is [k][feature] in bf16 and [feature][k] in bfp16,
// whose 8 values that share an exponent lie along k. Caller: aie/designs/dequant_engine.py, on
// every tile, with one block in and one panel out for each call.
#include "aie/kernels/common/loops.h"
#include "aie/kernels/common/modes.h"
#include "aie/kernels/common/q4nx.h"
#include "aie/kernels/kernels.h"

namespace flownpu {
namespace {

namespace q = q4nx;

// The same 8 parameters for each of 8 columns.
aie::vector<bfloat16, 64> repeat(const aie::vector<bfloat16, 8>& v) {
  return aie::concat(v, v, v, v, v, v, v, v);
}

// Calls store(sub-tile [8 k][8 features] in bf16) for each sub-tile, in the order of panels(256,
// 32). `planes`: 1 or 2 blocks that follow one another.
template <unsigned planes, typename Store>
void dequantize(const std::uint8_t* block, Store store) {
  const auto ones = aie::broadcast<bfloat16, 64>(bfloat16(1.0F));
  AIE_LOOP_MIN_ITERATION_COUNT(32)
  for (unsigned slab = 0; slab < q::kColumns / 8; ++slab) {
    AIE_LOOP_UNROLL_FULL
    for (unsigned strip = 0; strip < q::kStrips; ++strip) {
      aie::accum<accfloat, 64> weights[2];
      AIE_LOOP_UNROLL_FULL
      for (unsigned plane = 0; plane < planes; ++plane) {
        const std::uint8_t* of_plane = block + plane * q::kBlockBytes;
        const bfloat16* scales = q::scales(of_plane) + slab * 8 / q::kGroup * q::kRows;
        const aie::vector<std::uint8_t, 64> codes = q::load_codes(of_plane, strip, slab);
        AIE_LOOP_UNROLL_FULL
        for (unsigned half = 0; half < 2; ++half) {
          // A column has 8 bytes; 4 of them are the codes of 8 rows.
          const aie::vector<std::uint8_t, 32> rows =
              half == 0 ? aie::filter_even(codes, 4) : aie::filter_odd(codes, 4);
          const unsigned row = strip * q::kStripRows + half * 8;
          const auto scale = repeat(aie::load_v<8>(scales + row));
          const auto minimum = repeat(aie::load_v<8>(scales + q::kScales + row));
          // Multiples of the scale add up exactly; only the low plane's minimum is rounded to f32.
          if (plane == 0) weights[half] = aie::accum<accfloat, 64>(minimum);
          weights[half] = aie::mac(weights[half], q::to_bf16(rows), scale);
          if (plane == 1) weights[half] = aie::mac(weights[half], minimum, ones);
        }
      }
      for (const auto& half : weights) store(half.template to_vector<bfloat16>());
    }
  }
}

template <unsigned planes>
void to_bf16(const std::uint8_t* __restrict block, bfloat16* __restrict tile) {
  event0();
  set_conversion_modes();
  dequantize<planes>(block, [&](const aie::vector<bfloat16, 64>& weights) {
    aie::store_v(tile, weights);
    tile += 64;
  });
  event1();
}

#if __AIE_ARCH__ >= 21
template <unsigned planes>
void to_bfp16(const std::uint8_t* __restrict block, bfp16ebs8* __restrict tile) {
  event0();
  set_conversion_modes();
  aie::block_vector_output_buffer_stream<bfp16ebs8, 64> stream(tile);
  dequantize<planes>(block, [&](const aie::vector<bfloat16, 64>& weights) {
    const aie::accum<accfloat, 64> by_feature(aie::transpose(weights, 8, 8));
    stream.push(by_feature.to_vector<bfp16ebs8>());
  });
  event1();
}
#endif

}  // namespace
}  // namespace flownpu

extern "C" {

void q4nx_dequant_bf16(const std::uint8_t* __restrict block, bfloat16* __restrict tile) {
  flownpu::to_bf16<1>(block, tile);
}
void q4nx_dequant_planes_bf16(const std::uint8_t* __restrict blocks, bfloat16* __restrict tile) {
  flownpu::to_bf16<2>(blocks, tile);
}

#if __AIE_ARCH__ >= 21
void q4nx_dequant_bfp16(const std::uint8_t* __restrict block, bfp16ebs8* __restrict tile) {
  flownpu::to_bfp16<1>(block, tile);
}
void q4nx_dequant_planes_bfp16(const std::uint8_t* __restrict blocks, bfp16ebs8* __restrict tile) {
  flownpu::to_bfp16<2>(blocks, tile);
}
#endif

}  // extern "C"
