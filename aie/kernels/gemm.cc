// SPDX-License-Identifier: Apache-2.0
// C[m,n] += A[m,k] B[k,n] on one tile (Gemma3 on NPU, section 3.1.2; GEMM balance, section 4.2):
// output stationary, f32 accumulators in L1 over the k tiles.
//
// Dataflow: a row of 4 sub-tiles of C stays in 4 of the 5 accumulators; in each step along k one
// sub-tile of A meets a slab of B (4 sub-tiles). B is read from end to end, once for each 8 rows of
// A. Layout: A tiled(m, k), B panels(k, n), C tiled(m, n); kernels/README.md defines them. Caller:
// aie/designs/gemm.py: zero_f32, then gemm_* for each k tile, then store_*.
//
// XDNA2 multiplies bf16 in block floating point (8 values, one exponent, 8-bit mantissas): it has
// no bf16 matrix unit, and the exact emulation is 6 times slower.
#define AIE_API_EMULATE_BFLOAT16_MMUL_WITH_BFP16 1
#include <aie_api/aie.hpp>

#include "aie/kernels/common/loops.h"
#include "aie/kernels/common/modes.h"
#include "aie/kernels/kernels.h"

namespace flownpu {
namespace {

constexpr unsigned kSide = 8;
constexpr unsigned kSubTile = kSide * kSide;
// Sub-tiles across a panel of B: 32 columns, one row of Q4NX blocks.
constexpr unsigned kPanel = 4;

// Reads sub-tiles of B one after the other, from `sub_tile` on: by a pointer in bf16, by a stream
// in bfp16, whose vectors of 72 bytes are not aligned.
struct Bf16Reader {
  const bfloat16* at;
  Bf16Reader(const bfloat16* b, unsigned sub_tile) : at(b + sub_tile * kSubTile) {}
  aie::vector<bfloat16, kSubTile> next() {
    const auto values = aie::load_v<kSubTile>(at);
    at += kSubTile;
    return values;
  }
};
#if __AIE_ARCH__ >= 21
struct Bfp16Reader {
  aie::block_vector_input_buffer_stream<bfp16ebs8, kSubTile> stream;
  Bfp16Reader(const bfp16ebs8* b, unsigned sub_tile) : stream(b) {
    stream.seek(static_cast<int>(sub_tile));
  }
  // The matrix unit takes a block vector as the transpose of its right operand.
  auto next() { return aie::op_transpose(stream.pop()); }
};
#endif

template <typename Mmul, typename Reader, typename TypeB>
void gemm(const bfloat16* a, const TypeB* b, float* c, unsigned m, unsigned k, unsigned n) {
  const unsigned k_tiles = k / kSide;
  const unsigned n_tiles = n / kSide;
  for (unsigned panel = 0; panel < n_tiles / kPanel; ++panel) {
    for (unsigned row = 0; row < m / kSide; ++row) {
      float* out = c + (row * n_tiles + panel * kPanel) * kSubTile;
      const bfloat16* left = a + row * k_tiles * kSubTile;
      Reader right(b, panel * k_tiles * kPanel);
      Mmul c0(aie::load_v<kSubTile>(out));
      Mmul c1(aie::load_v<kSubTile>(out + kSubTile));
      Mmul c2(aie::load_v<kSubTile>(out + 2 * kSubTile));
      Mmul c3(aie::load_v<kSubTile>(out + 3 * kSubTile));
      AIE_PREPARE_FOR_PIPELINING
      AIE_LOOP_MIN_ITERATION_COUNT(1)
      for (unsigned i = 0; i < k_tiles; ++i) {
        const aie::vector<bfloat16, kSubTile> a0 = aie::load_v<kSubTile>(left + i * kSubTile);
        c0.mac(a0, right.next());
        c1.mac(a0, right.next());
        c2.mac(a0, right.next());
        c3.mac(a0, right.next());
      }
      aie::store_v(out, c0.template to_vector<float>());
      aie::store_v(out + kSubTile, c1.template to_vector<float>());
      aie::store_v(out + 2 * kSubTile, c2.template to_vector<float>());
      aie::store_v(out + 3 * kSubTile, c3.template to_vector<float>());
    }
  }
}

}  // namespace
}  // namespace flownpu

extern "C" {

void gemm_bf16(const bfloat16* __restrict a, const bfloat16* __restrict b, float* __restrict c,
               std::int32_t m, std::int32_t k, std::int32_t n) {
  event0();
  flownpu::set_conversion_modes();
  using Mmul = aie::mmul<8, 8, 8, bfloat16, bfloat16, accauto>;
  flownpu::gemm<Mmul, flownpu::Bf16Reader>(a, b, c, m, k, n);
  event1();
}

#if __AIE_ARCH__ >= 21
void gemm_bfp16(const bfloat16* __restrict a, const bfp16ebs8* __restrict b, float* __restrict c,
                std::int32_t m, std::int32_t k, std::int32_t n) {
  event0();
  flownpu::set_conversion_modes();
  using Mmul = aie::mmul<8, 8, 8, bfloat16, bfp16ebs8, accauto>;
  flownpu::gemm<Mmul, flownpu::Bfp16Reader>(a, b, c, m, k, n);
  event1();
}
#endif

}  // extern "C"
