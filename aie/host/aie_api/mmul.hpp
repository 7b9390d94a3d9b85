// SPDX-License-Identifier: Apache-2.0
// aie::mmul: C[M,N] += A[M,K] B[K,N] on registers, for exactly the shapes an architecture has.
#pragma once

#include "operations.hpp"

namespace aie {
inline namespace FLOWNPU_AIE_ARCHITECTURE {
namespace host {

// The shapes that exist: detail/aie2/mmul_bf16_bf16.hpp and detail/aie2p/mmul_bf16_bf16.hpp,
// mmul_bfp16_bfp16.hpp.
template <unsigned M, unsigned K, unsigned N, typename A, typename B>
constexpr bool has_mmul() {
  const auto is = [](unsigned m, unsigned k, unsigned n) { return M == m && K == k && N == n; };
  if constexpr (is_one_of<A, bfloat16> && is_one_of<B, bfloat16>) {
    const bool both = is(4, 8, 4) || is(8, 8, 4) || is(4, 8, 8) || is(8, 8, 8) || is(8, 1, 8);
    return both || (__AIE_ARCH__ == 20 && (is(4, 16, 4) || is(4, 16, 8)));
  } else if constexpr (is_one_of<B, bfp16ebs8> && is_one_of<A, bfloat16, bfp16ebs8>) {
    return __AIE_ARCH__ >= 21 && (is(8, 8, 8) || (is_one_of<A, bfp16ebs8> && is(8, 8, 16)));
  } else {
    return false;
  }
}

template <typename T, unsigned N>
struct Operand {
  using type = vector<T, N>;
};
template <unsigned N>
struct Operand<bfp16ebs8, N> {
  using type = block_vector<bfp16ebs8, N>;
};

// The right operand of `mul` and `mac`.
template <typename T, unsigned N>
struct RightOperand : Operand<T, N> {};
template <unsigned N>
struct RightOperand<bfp16ebs8, N> {
  using type = Transposed<block_vector<bfp16ebs8, N>>;
};

template <unsigned N>
void to_floats(const vector<bfloat16, N>& v, float* values) {
  for (unsigned i = 0; i < N; ++i) values[i] = float(v.data()[i]);
}
template <unsigned N>
void to_floats(const block_vector<bfp16ebs8, N>& v, float* values) {
  for (unsigned i = 0; i < N / 8; ++i, values += 8) from_block(v.blocks[i], values);
}

// Transposes bytes [8][8], a row a word: squares of 4 x 4, 2 x 2, then single bytes that lie across
// the diagonal from one another change places.
inline void transpose_bytes(std::uint64_t* rows) {
  const auto swap = [rows](unsigned distance, std::uint64_t kept) {
    for (unsigned i = 0; i < 8; ++i) {
      if ((i & distance) != 0) continue;
      std::uint64_t& low = rows[i];
      std::uint64_t& high = rows[i + distance];
      const std::uint64_t moved = ((low >> (8 * distance)) ^ high) & kept;
      high ^= moved;
      low ^= moved << (8 * distance);
    }
  };
  swap(4, 0x00000000ffffffffu);
  swap(2, 0x0000ffff0000ffffu);
  swap(1, 0x00ff00ff00ff00ffu);
}

// Blocks along K, [N][K = 8], as f32 [K][N].
template <unsigned N>
void to_columns(const block_vector<bfp16ebs8, N * 8>& v, float* values) {
  for (unsigned first = 0; first < N; first += 8) {
    std::uint64_t rows[8];
    float units[8];
    for (unsigned i = 0; i < 8; ++i) {
      std::memcpy(&rows[i], v.blocks[first + i].mantissa, 8);
      units[i] = unit_of(v.blocks[first + i].exponent);
    }
    transpose_bytes(rows);
    for (unsigned k = 0; k < 8; ++k) {
      std::int8_t mantissas[8];
      std::memcpy(mantissas, &rows[k], 8);
      for (unsigned i = 0; i < 8; ++i)
        values[k * N + first + i] = static_cast<float>(mantissas[i]) * units[i];
    }
  }
}

// Rounds values to block floating point, as the core does before a product in that format.
template <unsigned N>
void through_blocks(float* values) {
  const rounding_mode mode = core_state.rounding;
  for (unsigned i = 0; i < N; i += 8) through_block(values + i, mode);
}

#if __AIE_ARCH__ >= 21 && defined(AIE_API_EMULATE_BFLOAT16_MMUL_WITH_BFP16)
inline constexpr bool kEmulatesBf16 = AIE_API_EMULATE_BFLOAT16_MMUL_WITH_BFP16 != 0;
#else
inline constexpr bool kEmulatesBf16 = false;
#endif

}  // namespace host

// aie.hpp, `struct mmul`. Vectors of A and C are row-major. B is row-major [K][N] in bf16 and
// [N][K] in bfp16, whose blocks run along K: the instruction multiplies by the transpose, and takes
// B as op_transpose(B) alone. bf16 x
// bf16 of XDNA2 is exact and slow, or, where AIE_API_EMULATE_BFLOAT16_MMUL_WITH_BFP16 is defined,
// goes through bfp16 for 4x8x8 and 8x8x8. The order of the K additions is not specified by the
// hardware.
template <unsigned M_, unsigned K_, unsigned N_, typename TypeA, typename TypeB = TypeA,
          typename Tag = accauto>
class mmul {
#if __AIE_ARCH__ == 20
  static_assert(
      host::has_mmul<M_, K_, N_, TypeA, TypeB>(),
      "XDNA has no mmul of this shape; legal shapes: bfloat16 x bfloat16 4x8x4, 8x8x4, 4x8x8, "
      "8x8x8, 4x16x4, 4x16x8, 8x1x8; no bfp16ebs8");
#else
  static_assert(
      host::has_mmul<M_, K_, N_, TypeA, TypeB>(),
      "XDNA2 has no mmul of this shape; legal shapes: bfloat16 x bfloat16 4x8x4, 8x8x4, 4x8x8, "
      "8x8x8, 8x1x8; bfloat16 x bfp16ebs8 8x8x8; bfp16ebs8 x bfp16ebs8 8x8x8, 8x8x16");
#endif
  static_assert(host::is_one_of<Tag, accauto, accfloat>, "expected an accumulator of accfloat");

 public:
  static constexpr unsigned M = M_, K = K_, N = N_;
  static constexpr unsigned size_A = M * K, size_B = K * N, size_C = M * N;
  using vector_A_type = typename host::Operand<TypeA, size_A>::type;
  using vector_B_type = typename host::Operand<TypeB, size_B>::type;
  using accum_type = accum<accfloat, size_C>;
  using Right = typename host::RightOperand<TypeB, size_B>::type;

  mmul() : sum_(zeros<accfloat, size_C>()) {}
  explicit mmul(const accum_type& sum) : sum_(sum) {}
  explicit mmul(const vector<float, size_C>& sum) : sum_(sum) {}

  // aie.hpp: `requires VecB::is_operation(Operation::Transpose)`.
  template <unsigned Size>
  void mul(const vector_A_type&, const block_vector<bfp16ebs8, Size>&) {
    refuse_block_vector<Size>();
  }
  template <unsigned Size>
  void mac(const vector_A_type&, const block_vector<bfp16ebs8, Size>&) {
    refuse_block_vector<Size>();
  }
  void mul(const vector_A_type& a, const Right& b) {
    sum_ = zeros<accfloat, size_C>();
    mac(a, b);
  }
  void mac(const vector_A_type& a_vector, const Right& b_vector) {
    constexpr bool kBlocks = host::is_one_of<TypeB, bfp16ebs8>;
    constexpr bool kEmulated = !kBlocks && host::kEmulatesBf16 && K == 8 && N == 8;
    float a[size_A];
    float b[size_B];
    host::to_floats(a_vector, a);
    if constexpr (kBlocks) {
      host::to_columns<N>(b_vector.vector, b);
    } else {
      host::to_floats(b_vector, b);
    }
    if constexpr (kEmulated || (kBlocks && host::is_one_of<TypeA, bfloat16>)) {
      host::through_blocks<size_A>(a);
    }
    if constexpr (kEmulated) {
      float columns[size_B];  // [N][K]
      for (unsigned i = 0; i < size_B; ++i) columns[i % N * K + i / N] = b[i];
      host::through_blocks<size_B>(columns);
      for (unsigned i = 0; i < size_B; ++i) b[i] = columns[i % N * K + i / N];
    }
    host::Floats of_b[K][N / 4];
    std::memcpy(of_b, b, sizeof(of_b));
    for (unsigned row = 0; row < M; ++row) {
      host::Floats sums[N / 4];
      std::memcpy(sums, sum_.data() + row * N, sizeof(sums));
      for (unsigned k = 0; k < K; ++k) {
        for (unsigned i = 0; i < N / 4; ++i) sums[i] = sums[i] + a[row * K + k] * of_b[k][i];
      }
      std::memcpy(sum_.data() + row * N, sums, sizeof(sums));
    }
  }

  template <typename T>
  auto to_vector(int shift = 0) const {
    return sum_.template to_vector<T>(shift);
  }
  accum_type to_accum() const { return sum_; }

 private:
  template <unsigned Size>
  static void refuse_block_vector() {
    static_assert(Size == 0, "mmul takes a block vector B as aie::op_transpose(B) only");
  }
  accum_type sum_;
};

}  // namespace FLOWNPU_AIE_ARCHITECTURE
}  // namespace aie
