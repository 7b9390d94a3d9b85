// SPDX-License-Identifier: Apache-2.0
// FlowKV's shares put together: o = sum of w_t o_t over the tiles t that each had a share of the
// keys, w_t = l_t 2^(m_t - m) / l, m the largest m_t, l the sum of the numerators (eq. 7-12 once
// more, a share in the place of a chunk).
//
// Dataflow: shares are taken in parts; weights of all heads at once; then a head's outputs, some
// tiles' at a time, are summed in f32; tile 0 begins a sum. Layout: shares [KV heads][tiles][m,
// l][8 rows] f32, as they came in bf16 words; weights f32 [heads][32]; outputs [tiles][d]. Caller:
// aie/designs/decode_layer/split.py.
#include "aie/kernels/attention.h"
#include "aie/kernels/kernels.h"

namespace flownpu {
namespace {

constexpr unsigned kTiles = 32;  // at most
constexpr unsigned kRows = 8;
constexpr unsigned kLine = 32;

}  // namespace
}  // namespace flownpu

extern "C" {

void flow_kv_merge_take(const bfloat16* __restrict part, bfloat16* __restrict shares,
                        std::int32_t index, std::int32_t n) {
  event0();
  for (std::int32_t i = 0; i < n; i += flownpu::kLine) {
    aie::store_v(shares + index * n + i, aie::load_v<flownpu::kLine>(part + i));
  }
  event1();
}

void flow_kv_merge_weights(const bfloat16* __restrict shares, float* __restrict weights,
                           std::int32_t turns, std::int32_t rows, std::int32_t tiles) {
  using namespace flownpu;
  event0();
  round_to_nearest();
  const auto* of_tiles = reinterpret_cast<const float*>(shares);
  const auto rounder = aie::broadcast<float, kTiles>(kRounder);
  for (std::int32_t turn = 0; turn < turns; ++turn) {
    for (std::int32_t row = 0; row < rows; ++row) {
      Float<kTiles> m = aie::broadcast<float, kTiles>(attention::kLowest);
      Float<kTiles> l = aie::zeros<float, kTiles>();
      for (std::int32_t tile = 0; tile < tiles; ++tile) {
        const auto share = aie::load_v<2 * kRows>(of_tiles + (turn * tiles + tile) * 2 * kRows);
        m.set(share.get(row), tile);
        l.set(share.get(kRows + row), tile);
      }
      const auto largest = aie::broadcast<float, kTiles>(aie::reduce_max(m));
      const auto change =
          aie::max(aie::sub(m, largest), aie::broadcast<float, kTiles>(kLowestExponent));
      const Bf16<kTiles> power =
          Accumulator<kTiles>(power_of_integer(aie::add(change, rounder))).to_vector<bfloat16>();
      const Accumulator<kTiles> numerators = multiply_by_power(Accumulator<kTiles>(l), power);
      const float sum = aie::reduce_add(numerators.to_vector<float>());
      const auto inverse = split(reciprocal(constant<kTiles>(sum)));
      aie::store_v(weights + (turn * rows + row) * kTiles,
                   multiply(split(numerators), inverse).to_vector<float>());
    }
  }
  event1();
}

void flow_kv_merge(const bfloat16* __restrict outputs, const float* __restrict weights,
                   float* __restrict sum, std::int32_t head, std::int32_t first, std::int32_t tiles,
                   std::int32_t d) {
  using namespace flownpu;
  event0();
  round_to_nearest();
  const auto of_head = aie::load_v<kTiles>(weights + head * kTiles);
  if (first == 0) {
    for (std::int32_t i = 0; i < d; i += kLine) {
      aie::store_v(sum + i, aie::zeros<float, kLine>());
    }
  }
  for (std::int32_t tile = 0; tile < tiles; ++tile) {
    const auto weight = broadcast_parts<kLine>(of_head.get(first + tile));
    AIE_PREPARE_FOR_PIPELINING
    AIE_LOOP_MIN_ITERATION_COUNT(1)
    for (std::int32_t i = 0; i < d; i += kLine) {
      const auto output = aie::load_v<kLine>(outputs + tile * d + i);
      const Accumulator<kLine> total(aie::load_v<kLine>(sum + i));
      const auto both = aie::mac(aie::mac(total, weight.high, output), weight.low, output);
      aie::store_v(sum + i, both.to_vector<float>());
    }
  }
  event1();
}

void flow_kv_merge_store(const float* __restrict sum, bfloat16* __restrict o, std::int32_t place,
                         std::int32_t d) {
  using namespace flownpu;
  event0();
  round_to_nearest();
  for (std::int32_t i = 0; i < d; i += kLine) {
    const Accumulator<kLine> values(aie::load_v<kLine>(sum + i));
    aie::store_v(o + place * d + i, values.to_vector<bfloat16>());
  }
  event1();
}

}  // extern "C"
