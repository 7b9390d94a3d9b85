// SPDX-License-Identifier: Apache-2.0
// FlowQKV (Gemma3 on NPU, section 3.1.3): a chunk of queries against a sweep of key/value chunks,
// on one tile. Causal, sliding-window (SWA) and non-causal (NCA) differ in the run-time parameters
// alone.
//
// F are the softmax's numerators, Y their sum over V, l their sum.
// Dataflow: Q stays; for each chunk K, V: scores (eq. 6-10), then values (eq. 11); at the end O = Y
// / l (eq. 12). Rows are queries of one head, or of all heads of a group, one after the other.
// A chunk whose keys are seen by all rows needs no masks, which is decided once a call, from
// positions alone.
// Scores: blocks of 2 x 2 sub-tiles, in 4 of the 5 accumulators; each step along d has 4
// conversions for 4 products. Values: F of 2 rows x 2 keys of sub-tiles stays in registers during a
// loop over the columns of V and Y, so that the loop is as long as d, not as a chunk; a step has 2
// conversions, 4 products, and 2 sub-tiles of Y in and out.
// Layout: Q, K, V, F tiled(); Y f32 tiled(rows, d); O tiled(rows, columns) with the columns from
// part x columns on, so that no tile needs room for all of O; scores f32 [2][keys/8][8][8] of two
// rows of sub-tiles. K is multiplied transposed, so that the cache need not be. Caller:
// aie/designs/flow_qkv.py.
//
// XDNA2: products in block floating point, as in gemm.cc; along d for Q and K, along keys for F and
// V.
#define AIE_API_EMULATE_BFLOAT16_MMUL_WITH_BFP16 1
#include <aie_api/aie.hpp>
#include <type_traits>

#include "aie/kernels/common/attention.h"
#include "aie/kernels/kernels.h"

namespace flownpu {
namespace {

namespace at = attention;

constexpr unsigned kRows = 8;
constexpr unsigned kSubTile = kRows * at::kSide;

// How the matrix unit takes sub-tiles: Q and F [8 rows][8], K [8 keys][8 of d], V [8 keys][8 of d].
#if __AIE_ARCH__ >= 21
// Both operands are in blocks along the dimension that is summed, and the right one is multiplied
// transposed: K is taken as it lies, V is transposed first.
struct Operands {
  using Mmul = aie::mmul<8, 8, 8, bfp16ebs8, bfp16ebs8, accauto>;
  using Vector = aie::vector<bfloat16, kSubTile>;
  static Mmul::vector_A_type in_blocks(const Vector& sub_tile) {
    return Accumulator<kSubTile>(sub_tile).to_vector<bfp16ebs8>();
  }
  static Mmul::vector_A_type left(const bfloat16* at) {
    return in_blocks(aie::load_v<kSubTile>(at));
  }
  static Mmul::vector_B_type keys(const bfloat16* at) {
    return in_blocks(aie::load_v<kSubTile>(at));
  }
  static Mmul::vector_B_type values(const bfloat16* at) {
    return in_blocks(aie::transpose(aie::load_v<kSubTile>(at), 8, 8));
  }
  static auto right(const Mmul::vector_B_type& sub_tile) { return aie::op_transpose(sub_tile); }
};
#else
struct Operands {
  using Mmul = aie::mmul<8, 8, 8, bfloat16, bfloat16, accauto>;
  using Vector = aie::vector<bfloat16, kSubTile>;
  static Vector left(const bfloat16* at) { return aie::load_v<kSubTile>(at); }
  static Vector keys(const bfloat16* at) { return aie::transpose(aie::load_v<kSubTile>(at), 8, 8); }
  static Vector values(const bfloat16* at) { return aie::load_v<kSubTile>(at); }
  static Vector right(const Vector& sub_tile) { return sub_tile; }
};
#endif

// Calls step(row, sub-tiles) for the rows of a tile: two sub-tiles of rows at a time, then one if
// one is left.
template <typename Step>
void for_rows(std::int32_t rows, Step step) {
  const auto count = static_cast<unsigned>(rows);
  unsigned row = 0;
  for (; row + 2 * kRows <= count; row += 2 * kRows)
    step(row, std::integral_constant<unsigned, 2>());
  if (row < count) step(row, std::integral_constant<unsigned, 1>());
}

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
                     std::int32_t rows, std::int32_t keys, std::int32_t d, std::int32_t cap) {
  using namespace flownpu;
  event0();
  set_conversion_modes();
  const at::Parameters parameters(rtp, cap);
  const std::int32_t key = at::load_position(state);
  const bool masked = !at::sees_all(key, keys, parameters);
  for_rows(rows, [&](unsigned row, auto sub_tiles) {
    at::score_rows<kRows, sub_tiles(), Operands>(
        q + row * d, k, parameters, key, masked, row, at::maxima(state) + row,
        at::denominators(state, rows) + row, correction + row, f + row * keys, scores,
        keys / at::kSide, d / at::kSide);
  });
  at::store_position(state, key + keys);
  event1();
}

void flow_qkv_values(const bfloat16* __restrict f, const bfloat16* __restrict v,
                     const float* __restrict correction, float* __restrict y, std::int32_t rows,
                     std::int32_t keys, std::int32_t d) {
  using namespace flownpu;
  event0();
  set_conversion_modes();
  for_rows(rows, [&](unsigned row, auto sub_tiles) {
    at::add_values<kRows, sub_tiles(), Operands>(f + row * keys, v, correction + row, y + row * d,
                                                 keys / at::kSide, d / at::kSide);
  });
  event1();
}

void flow_qkv_finish(const float* __restrict state, const float* __restrict y,
                     bfloat16* __restrict o, std::int32_t part, std::int32_t columns,
                     std::int32_t rows, std::int32_t d) {
  using namespace flownpu;
  event0();
  set_conversion_modes();
  for (unsigned row = 0; row < static_cast<unsigned>(rows); row += kRows) {
    const auto inverse =
        at::inverse_by_row<kRows>(aie::load_v<kRows>(at::denominators(state, rows) + row));
    const float* sums_of_rows = y + row * d + part * columns * kRows;
    bfloat16* out = o + row * columns;
    for (unsigned i = 0; i < static_cast<unsigned>(columns) * kRows; i += kSubTile) {
      const Float<kSubTile> sums = aie::load_v<kSubTile>(sums_of_rows + i);
      aie::store_v(out + i, multiply(split(sums), inverse).template to_vector<bfloat16>());
    }
  }
  event1();
}

}  // extern "C"
