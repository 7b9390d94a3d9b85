// SPDX-License-Identifier: Apache-2.0
// FlowKV (Gemma3 on NPU, section 3.2.2-3, fig. 10): one query against the KV cache, on a pair of
// tiles.
//
// Dataflow: the K tile takes key chunks and does eq. 6-10; F, C and l (common/attention.h) go to
// its neighbour, the V tile, through shared memory; the V tile takes value chunks and does eq.
// 11-12. Rows are the query heads of a group, rounded up to a multiple of 4, so that each key and
// value is read once for all of them.
// Layout: K, V tiled(keys, d); q, o lines(heads, d); q_tile and Y [rows/4][d/8][4][8]; the hand-off
// is F in [rows/4][keys/8][4][8], then C f32[rows] and l f32[rows]; Y is followed by l f32[rows].
// Caller: aie/designs/flow_kv.py.
//
// Products of bf16 are exact on both generations, on XDNA2 by its slower emulation: decoding waits
// for memory, and 4 rows leave the matrix unit idle anyway.
#include "aie/kernels/common/attention.h"
#include "aie/kernels/kernels.h"

namespace flownpu {
namespace {

namespace at = attention;

constexpr unsigned kRows = 4;
constexpr unsigned kSubTile = kRows * at::kSide;

struct Operands {
  using Mmul = aie::mmul<4, 8, 8, bfloat16, bfloat16, accauto>;
  static Mmul::vector_A_type left(const bfloat16* at) { return aie::load_v<kSubTile>(at); }
  static Mmul::vector_B_type keys(const bfloat16* at) {
    return aie::transpose(aie::load_v<64>(at), 8, 8);
  }
  static Mmul::vector_B_type values(const bfloat16* at) { return aie::load_v<64>(at); }
  static Mmul::vector_B_type right(const Mmul::vector_B_type& sub_tile) { return sub_tile; }
};

// Where the hand-off's C begins, in bf16; l follows it.
const float* corrections(const bfloat16* handoff, unsigned rows, unsigned keys) {
  return reinterpret_cast<const float*>(handoff + rows * keys);
}

}  // namespace
}  // namespace flownpu

extern "C" {

void flow_kv_start(const bfloat16* __restrict q, const std::int32_t* __restrict rtp,
                   bfloat16* __restrict q_tile, float* __restrict state, std::int32_t heads,
                   std::int32_t rows, std::int32_t d) {
  using namespace flownpu;
  at::start_rows<kRows>(state, rows, at::Parameters(rtp));
  for (std::int32_t row = 0; row < rows; ++row) {
    bfloat16* out = q_tile + row / 4 * 4 * d + row % 4 * 8;
    for (std::int32_t i = 0; i < d; i += 8) {
      const Bf16<8> part =
          row < heads ? aie::load_v<8>(q + row * d + i) : aie::zeros<bfloat16, 8>();
      aie::store_v(out + i * 4, part);
    }
  }
}

void flow_kv_scores(const bfloat16* __restrict q_tile, const bfloat16* __restrict k,
                    const std::int32_t* __restrict rtp, float* __restrict state,
                    bfloat16* __restrict handoff, float* __restrict scores, std::int32_t rows,
                    std::int32_t keys, std::int32_t d, std::int32_t cap) {
  using namespace flownpu;
  event0();
  set_conversion_modes();
  const at::Parameters parameters(rtp, cap);
  const std::int32_t key = at::load_position(state);
  const bool masked = !at::sees_all(key, keys, parameters);
  auto* correction = reinterpret_cast<float*>(handoff + rows * keys);
  for (unsigned row = 0; row < static_cast<unsigned>(rows); row += kRows) {
    float* l = at::denominators(state, rows) + row;
    at::score_rows<kRows, 1, Operands>(
        q_tile + row * d, k, parameters, key, masked, row, at::maxima(state) + row, l,
        correction + row, handoff + row * keys, scores, keys / at::kSide, d / at::kSide);
    aie::store_v(correction + rows + row, aie::load_v<kRows>(l));
  }
  at::store_position(state, key + keys);
  event1();
}

void flow_kv_start_values(float* __restrict y, std::int32_t rows, std::int32_t d) {
  const auto zeros = aie::zeros<float, 4>();
  for (std::int32_t i = 0; i < rows * d + rows; i += 4) aie::store_v(y + i, zeros);
}

void flow_kv_values(const bfloat16* __restrict handoff, const bfloat16* __restrict v,
                    float* __restrict y, std::int32_t rows, std::int32_t keys, std::int32_t d) {
  using namespace flownpu;
  event0();
  set_conversion_modes();
  const float* correction = corrections(handoff, rows, keys);
  for (unsigned row = 0; row < static_cast<unsigned>(rows); row += kRows) {
    at::add_values<kRows, 1, Operands>(handoff + row * keys, v, correction + row, y + row * d,
                                       keys / at::kSide, d / at::kSide);
    aie::store_v(y + rows * d + row, aie::load_v<kRows>(correction + rows + row));
  }
  event1();
}

void flow_kv_finish(const float* __restrict y, bfloat16* __restrict o, std::int32_t heads,
                    std::int32_t rows, std::int32_t d) {
  using namespace flownpu;
  event0();
  set_conversion_modes();
  for (std::int32_t row = 0; row < rows; row += kRows) {
    const auto inverse = at::inverse_by_row<kRows>(aie::load_v<kRows>(y + rows * d + row));
    for (std::int32_t i = 0; i < d; i += 8) {
      const Float<kSubTile> sums = aie::load_v<kSubTile>(y + row * d + i * 4);
      const Bf16<kSubTile> part = multiply(split(sums), inverse).template to_vector<bfloat16>();
      for (unsigned r = 0; r < kRows; ++r) {
        const std::int32_t head = row + static_cast<std::int32_t>(r);
        if (head < heads) aie::store_v(o + head * d + i, part.extract<8>(r));
      }
    }
  }
  event1();
}

}  // extern "C"
