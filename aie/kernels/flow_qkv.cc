// SPDX-License-Identifier: Apache-2.0
// FlowQKV (Gemma3 on NPU, section 3.1.3): a chunk of queries against a sweep of key/value chunks,
// on one tile. Causal, sliding-window (SWA) and non-causal (NCA) differ in the run-time parameters
// alone.
//
// Dataflow: Q stays; for each chunk K, V: scores (eq. 6-10), then values (eq. 11); at the end O = Y
// / l (eq. 12). Rows are queries of one head, or of all heads of a group, one after the other.
// Layout: Q, K, V, F, O tiled(); Y f32 tiled(rows, d); scores f32 [keys/8][8][8] of one row of
// sub-tiles. K is multiplied transposed, so no one has to transpose the cache. Caller:
// aie/designs/flow_qkv.py.
//
// XDNA2: products in block floating point, as in gemm.cc; along d for Q and K, along keys for F and
// V.
#define AIE_API_EMULATE_BFLOAT16_MMUL_WITH_BFP16 1
#include <aie_api/aie.hpp>

#include "aie/kernels/attention.h"
#include "aie/kernels/kernels.h"

namespace flownpu {
namespace {

namespace at = attention;

constexpr unsigned kRows = 8;
constexpr unsigned kSubTile = kRows * at::kSide;

#if __AIE_ARCH__ >= 21
// K's sub-tile [8 keys][8 of d] in blocks along d is the operand that the instruction wants.
using KeyMmul = aie::mmul<8, 8, 8, bfloat16, bfp16ebs8, accauto>;
KeyMmul::vector_B_type load_keys(const bfloat16* k) {
  return Accumulator<kSubTile>(aie::load_v<kSubTile>(k)).to_vector<bfp16ebs8>();
}
#else
using KeyMmul = aie::mmul<8, 8, 8, bfloat16, bfloat16, accauto>;
KeyMmul::vector_B_type load_keys(const bfloat16* k) {
  return aie::transpose(aie::load_v<kSubTile>(k), 8, 8);
}
#endif
using ValueMmul = aie::mmul<8, 8, 8, bfloat16, bfloat16, accauto>;

}  // namespace
}  // namespace flownpu

extern "C" {

void flow_qkv_start(const std::int32_t* __restrict rtp, float* __restrict state,
                    float* __restrict y, std::int32_t rows, std::int32_t d) {
  namespace at = flownpu::attention;
  at::start_rows<flownpu::kRows>(state, rows, at::Parameters(rtp));
  const auto zeros = aie::zeros<float, 16>();
  for (std::int32_t i = 0; i < rows * d; i += 16) aie::store_v(y + i, zeros);
}

void flow_qkv_scores(const bfloat16* __restrict q, const bfloat16* __restrict k,
                     const std::int32_t* __restrict rtp, float* __restrict state,
                     float* __restrict correction, bfloat16* __restrict f, float* __restrict scores,
                     std::int32_t rows, std::int32_t keys, std::int32_t d) {
  using namespace flownpu;
  event0();
  round_to_nearest();
  const at::Parameters parameters(rtp);
  const std::int32_t key = at::load_position(state);
  const unsigned key_tiles = keys / at::kSide;
  const unsigned d_tiles = d / at::kSide;
  for (unsigned row = 0; row < static_cast<unsigned>(rows); row += kRows) {
    const auto multiply_keys = [&](unsigned j) {
      KeyMmul sum;
      AIE_PREPARE_FOR_PIPELINING
      AIE_LOOP_MIN_ITERATION_COUNT(1)
      for (unsigned i = 0; i < d_tiles; ++i) {
        sum.mac(aie::load_v<kSubTile>(q + row * d + i * kSubTile),
                load_keys(k + (j * d_tiles + i) * kSubTile));
      }
      return sum.to_accum();
    };
    at::soften_rows<kRows>(multiply_keys, parameters, key, row, key_tiles, at::maxima(state) + row,
                           at::denominators(state, rows) + row, correction + row, f + row * keys,
                           scores);
  }
  at::store_position(state, key + keys);
  event1();
}

void flow_qkv_values(const bfloat16* __restrict f, const bfloat16* __restrict v,
                     const float* __restrict correction, float* __restrict y, std::int32_t rows,
                     std::int32_t keys, std::int32_t d) {
  using namespace flownpu;
  event0();
  round_to_nearest();
  for (unsigned row = 0; row < static_cast<unsigned>(rows); row += kRows) {
    at::add_values<kRows, ValueMmul>(f + row * keys, v, aie::load_v<kRows>(correction + row),
                                     y + row * d, keys / at::kSide, d / at::kSide);
  }
  event1();
}

void flow_qkv_finish(const float* __restrict state, const float* __restrict y,
                     bfloat16* __restrict o, std::int32_t rows, std::int32_t d) {
  using namespace flownpu;
  event0();
  round_to_nearest();
  for (unsigned row = 0; row < static_cast<unsigned>(rows); row += kRows) {
    const auto inverse =
        at::inverse_by_row<kRows>(aie::load_v<kRows>(at::denominators(state, rows) + row));
    for (unsigned i = row * d; i < (row + kRows) * d; i += kSubTile) {
      const Float<kSubTile> sums = aie::load_v<kSubTile>(y + i);
      aie::store_v(o + i, multiply(split(sums), inverse).template to_vector<bfloat16>());
    }
  }
  event1();
}

}  // extern "C"
