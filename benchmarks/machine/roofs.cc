// SPDX-License-Identifier: Apache-2.0
// Arithmetic roofs of this processor: loops of one instruction on registers, compiled with
// -march=native.
//
// Each loop has independent accumulators: the instructions take 4 or 5 cycles, and at most 2 of
// them start in a cycle, so that 10 would do; 12 leave slack and fit the 16 registers of AVX2. Of
// the 32 of AVX-512 16 take more: a Granite Rapids core does 4 % more int8 dots with them.
#include <cstddef>
#include <cstdint>
#include <utility>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
using Accumulators = std::make_index_sequence<16>;
#else
using Accumulators = std::make_index_sequence<12>;
#endif
constexpr std::int64_t kAccumulators = Accumulators::size();

// Keeps a value in a register of its own, and the rounds from being merged.
template <typename Vector>
inline void keep(Vector& value) {
  asm volatile("" : "+v"(value));
}

// Runs `step` on each accumulator, `rounds` times; the sum keeps the compiler from dropping the
// work.
template <typename Vector, typename Step, std::size_t... I>
std::int64_t run(std::int64_t rounds, Vector seed, Step step, std::index_sequence<I...>) {
  Vector accumulators[] = {((void)I, seed)...};
  for (std::int64_t i = 0; i < rounds; ++i) {
    (step(accumulators[I]), ...);
    (keep(accumulators[I]), ...);
  }
  return (static_cast<std::int64_t>(accumulators[I][0]) + ...);
}

}  // namespace

// Each function returns the operations of a round (a multiply and an add are two), or 0 if the
// processor lacks the instruction; rounds = 0 only asks.
extern "C" std::int64_t int8_dot(std::int64_t rounds, std::int64_t* sum) {
#if defined(__AVX512VNNI__)
  const __m512i ones = _mm512_set1_epi8(1);
  *sum = run(
      rounds, ones, [=](__m512i& a) { a = _mm512_dpbusd_epi32(a, ones, ones); }, Accumulators());
  return kAccumulators * 16 * 4 * 2;
#elif defined(__AVXVNNI__)
  const __m256i ones = _mm256_set1_epi8(1);
  *sum = run(
      rounds, ones, [=](__m256i& a) { a = _mm256_dpbusd_avx_epi32(a, ones, ones); },
      Accumulators());
  return kAccumulators * 8 * 4 * 2;
#else
  return *sum = rounds * 0;
#endif
}

extern "C" std::int64_t bf16_dot(std::int64_t rounds, std::int64_t* sum) {
#if defined(__AVX512BF16__)
  const __m512bh ones = _mm512_cvtne2ps_pbh(_mm512_set1_ps(1), _mm512_set1_ps(1));
  *sum = run(
      rounds, _mm512_set1_ps(1), [=](__m512& a) { a = _mm512_dpbf16_ps(a, ones, ones); },
      Accumulators());
  return kAccumulators * 16 * 2 * 2;
#else
  return *sum = rounds * 0;
#endif
}

extern "C" std::int64_t float_fma(std::int64_t rounds, std::int64_t* sum) {
#if defined(__AVX512F__)
  const __m512 ones = _mm512_set1_ps(1);
  *sum = run(rounds, ones, [=](__m512& a) { a = _mm512_fmadd_ps(ones, ones, a); }, Accumulators());
  return kAccumulators * 16 * 2;
#elif defined(__FMA__)
  const __m256 ones = _mm256_set1_ps(1);
  *sum = run(rounds, ones, [=](__m256& a) { a = _mm256_fmadd_ps(ones, ones, a); }, Accumulators());
  return kAccumulators * 8 * 2;
#else
  return *sum = rounds * 0;
#endif
}
