// SPDX-License-Identifier: Apache-2.0
// FusedDQP (Gemma3 on NPU, section 3.2.1, eq. 15): y += dequant(w) x, for one Q4NX block w, without
// ever storing dequant(w).
//
// Dataflow: sub-blocks of 16 rows x 8 columns, one load each; codes become bf16 and meet x in
// registers. Since w = minimum + scale code, a group of 32 columns of a row gives
//     scale sum_k code_k x_k + minimum sum_k x_k,
// so scales are applied once a group, and the sums of x, shared by all rows, are made once for each
// vector x. Layout: block as in common/q4nx.h; x [K]: zeros from the weight's last column to the
// next multiple of 32, any finite numbers beyond (scales and minima are 0 there); sums [K/32][high,
// low]; y f32 [32 rows]. A weight of 8 bits is two planes of 4 (common/q4nx.h), so block j is for
// columns 256 (j / planes). Callers in aie/designs/: fused_dqp.py calls fused_dqp_group_sums once,
// then for each row of blocks zero_f32, fused_dqp for every block j, and store_*;
// decode_layer/array.py calls fused_dqp_take for each part of 256 of x instead of
// fused_dqp_group_sums.
#include "aie/kernels/common/float_math.h"
#include "aie/kernels/common/q4nx.h"
#include "aie/kernels/kernels.h"

namespace flownpu {
namespace {

namespace q = q4nx;

// dot[row] += sum over 8 columns of code[row] x, for a sub-block's 16 rows.
Accumulator<16> multiply_sub_block(Accumulator<16> dot, const aie::vector<std::uint8_t, 64>& codes,
                                   const Bf16<8>& x) {
  AIE_LOOP_UNROLL_FULL
  for (unsigned half = 0; half < 2; ++half) {
    const Bf16<64> columns = q::to_bf16(codes.extract<32>(half));
    AIE_LOOP_UNROLL_FULL
    for (unsigned column = 0; column < 4; ++column) {
      dot = aie::mac(dot, columns.extract<16>(column), x.get(half * 4 + column));
    }
  }
  return dot;
}

// The sums of x over the 8 groups of a block's columns, each as its high and its low part.
Bf16<16> group_sums(const bfloat16* x) {
  const auto ones = aie::broadcast<bfloat16, 32>(bfloat16(1.0F));
  Bf16<16> pairs;
  for (unsigned group = 0; group < q::kGroups; ++group) {
    const auto values = aie::load_v<32>(x + group * q::kGroup);
    const auto parts =
        broadcast_parts<16>(aie::reduce_add(aie::mul(values, ones).to_vector<float>()));
    pairs.set(parts.high.get(0), 2 * group);
    pairs.set(parts.low.get(0), 2 * group + 1);
  }
  return pairs;
}

}  // namespace
}  // namespace flownpu

extern "C" {

void fused_dqp_group_sums(const bfloat16* __restrict x, bfloat16* __restrict sums, std::int32_t k) {
  event0();
  flownpu::set_conversion_modes();
  for (unsigned block = 0; block < static_cast<unsigned>(k) / flownpu::q4nx::kColumns; ++block) {
    aie::store_v(sums + block * 16, flownpu::group_sums(x + block * flownpu::q4nx::kColumns));
  }
  event1();
}

void fused_dqp_take(const bfloat16* __restrict part, bfloat16* __restrict x,
                    bfloat16* __restrict sums, std::int32_t j) {
  event0();
  flownpu::set_conversion_modes();
  AIE_PREPARE_FOR_PIPELINING
  for (unsigned i = 0; i < flownpu::q4nx::kColumns; i += 32) {
    aie::store_v(x + j * flownpu::q4nx::kColumns + i, aie::load_v<32>(part + i));
  }
  aie::store_v(sums + j * 16, flownpu::group_sums(part));
  event1();
}

void fused_dqp(const std::uint8_t* __restrict block, const bfloat16* __restrict x,
               const bfloat16* __restrict sums, float* __restrict y, std::int32_t j,
               std::int32_t planes) {
  namespace q = flownpu::q4nx;
  event0();
  flownpu::set_conversion_modes();
  j >>= planes - 1;
  x += j * q::kColumns;
  const auto group_sums = aie::load_v<2 * q::kGroups>(sums + j * 2 * q::kGroups);
  for (unsigned strip = 0; strip < q::kStrips; ++strip) {
    flownpu::Accumulator<16> total(aie::load_v<16>(y + strip * q::kStripRows));
    for (unsigned group = 0; group < q::kGroups; ++group) {
      auto dot = aie::zeros<accfloat, 16>();
      AIE_LOOP_UNROLL_FULL
      for (unsigned sub = 0; sub < q::kGroup / q::kSubColumns; ++sub) {
        const unsigned at = group * (q::kGroup / q::kSubColumns) + sub;
        dot = flownpu::multiply_sub_block(dot, q::load_codes(block, strip, at),
                                          aie::load_v<8>(x + at * q::kSubColumns));
      }
      const unsigned row = group * q::kRows + strip * q::kStripRows;
      const auto scale = aie::load_v<16>(q::scales(block) + row);
      const auto minimum = aie::load_v<16>(q::minima(block) + row);
      const auto parts = flownpu::split(dot);
      total = aie::mac(total, parts.high, scale);
      total = aie::mac(total, parts.low, scale);
      total = aie::mac(total, minimum, group_sums.get(2 * group));
      total = aie::mac(total, minimum, group_sums.get(2 * group + 1));
    }
    aie::store_v(y + strip * q::kStripRows, total.to_vector<float>());
  }
  event1();
}

}  // extern "C"
