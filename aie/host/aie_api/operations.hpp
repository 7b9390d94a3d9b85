// SPDX-License-Identifier: Apache-2.0
// Free functions on vectors and accumulators: memory, arithmetic, comparison, rearrangement. All of
// them are declared in aie.hpp.
#pragma once

#include <utility>

#include "vector.hpp"

namespace aie {
inline namespace FLOWNPU_AIE_ARCHITECTURE {
namespace host {
// Products that the vector unit has, into accfloat. There is no multiplier for f32 x f32: aie_api
// emulates it with three bf16 parts of each operand, in tens of instruction bundles
// (detail/aie2*/mul_acc32_fp.hpp), so no kernel of ours uses it and the host refuses it.
template <typename A, typename B>
inline constexpr bool is_product = is_one_of<A, bfloat16> && is_one_of<B, bfloat16>;

// The vector, or accumulator, of function(0), function(1) ..
template <unsigned N, typename Function>
auto generate(Function function) {
  vector<decltype(function(0U)), N> v;
  for (unsigned i = 0; i < N; ++i) v.data()[i] = function(i);
  return v;
}
template <unsigned N, typename Function>
accum<accfloat, N> accumulate(Function function) {
  accum<accfloat, N> acc;
  for (unsigned i = 0; i < N; ++i) acc.data()[i] = function(i);
  return acc;
}
}  // namespace host

// Memory. Loads and stores are of 128 bits and more; a misaligned one, or one outside of the
// kernel's buffers, throws Trap.
template <unsigned N, typename T>
vector<T, N> load_v(const T* pointer) {
  constexpr std::size_t kBytes = N * sizeof(T);
  host::check_access(pointer, kBytes, false, host::alignment_of_access(kBytes));
  vector<T, N> v;
  std::memcpy(v.data(), pointer, kBytes);
  return v;
}
template <typename T, unsigned N>
T* store_v(T* pointer, const vector<T, N>& v) {
  constexpr std::size_t kBytes = N * sizeof(T);
  host::check_access(pointer, kBytes, true, host::alignment_of_access(kBytes));
  std::memcpy(pointer, v.data(), kBytes);
  return pointer;
}

// iterator.hpp, `block_vector_input_buffer_stream`; `seek` (in vectors) as
// aie_kernels/linalg/mm_bfp.cc calls it, on its base class.
template <typename T, unsigned N>
class block_vector_input_buffer_stream {
 public:
  explicit block_vector_input_buffer_stream(const T* pointer) : pointer_(pointer) {}
  block_vector<T, N> pop() {
    block_vector<T, N> v;
    host::check_access(pointer_, sizeof(v.blocks), false, 1);
    std::memcpy(v.blocks.data(), pointer_, sizeof(v.blocks));
    pointer_ += N / 8;
    return v;
  }
  void seek(int vectors) { pointer_ += vectors * static_cast<int>(N / 8); }

 private:
  const T* pointer_;
};
// iterator.hpp, `block_vector_output_buffer_stream`.
template <typename T, unsigned N>
class block_vector_output_buffer_stream {
 public:
  explicit block_vector_output_buffer_stream(T* pointer) : pointer_(pointer) {}
  void push(const block_vector<T, N>& v) {
    host::check_access(pointer_, sizeof(v.blocks), true, 1);
    std::memcpy(pointer_, v.blocks.data(), sizeof(v.blocks));
    pointer_ += N / 8;
  }

 private:
  T* pointer_;
};

// Construction.
template <typename T, unsigned N>
auto zeros() {
  if constexpr (host::is_one_of<T, accfloat, acc32>) {
    accum<T, N> acc;
    for (unsigned i = 0; i < N; ++i) acc.data()[i] = 0;
    return acc;
  } else {
    return host::generate<N>([](unsigned) { return T{}; });
  }
}
template <typename T, unsigned N>
vector<T, N> broadcast(T value) {
  return host::generate<N>([=](unsigned) { return value; });
}
template <typename T, unsigned N, typename... More>
auto concat(const vector<T, N>& first, const More&... more) {
  vector<T, N * (1 + sizeof...(More))> v;
  v.insert(0, first);
  unsigned at = 0;
  (v.insert(++at, more), ...);
  return v;
}

// Products. accfloat += bf16 x bf16: the product of two 8-bit mantissas is exact in f32, the sum is
// rounded to f32 once (to nearest even, whatever the rounding mode, which concerns conversions).
template <typename A, typename B, unsigned N>
  requires host::is_product<A, B>
accum<accfloat, N> mul(const vector<A, N>& a, const vector<B, N>& b) {
  return host::accumulate<N>([&](unsigned i) { return float(a.data()[i]) * float(b.data()[i]); });
}
template <typename A, unsigned N>
accum<accfloat, N> mul(const vector<A, N>& a, bfloat16 b) {
  return mul(a, broadcast<bfloat16, N>(b));
}
template <typename A, typename B, unsigned N>
  requires host::is_product<A, B>
accum<accfloat, N> mac(const accum<accfloat, N>& acc, const vector<A, N>& a,
                       const vector<B, N>& b) {
  return host::accumulate<N>(
      [&](unsigned i) { return acc.data()[i] + float(a.data()[i]) * float(b.data()[i]); });
}
template <typename A, unsigned N>
accum<accfloat, N> mac(const accum<accfloat, N>& acc, const vector<A, N>& a, bfloat16 b) {
  return mac(acc, a, broadcast<bfloat16, N>(b));
}
template <typename A, typename B, unsigned N>
  requires host::is_product<A, B>
accum<accfloat, N> msc(const accum<accfloat, N>& acc, const vector<A, N>& a,
                       const vector<B, N>& b) {
  return host::accumulate<N>(
      [&](unsigned i) { return acc.data()[i] - float(a.data()[i]) * float(b.data()[i]); });
}
template <typename A, unsigned N>
accum<accfloat, N> msc(const accum<accfloat, N>& acc, const vector<A, N>& a, bfloat16 b) {
  return msc(acc, a, broadcast<bfloat16, N>(b));
}

// Sums.
template <unsigned N>
accum<accfloat, N> add(const accum<accfloat, N>& a, const accum<accfloat, N>& b) {
  return host::accumulate<N>([&](unsigned i) { return a.data()[i] + b.data()[i]; });
}
template <typename T, unsigned N>
accum<accfloat, N> add(const accum<accfloat, N>& a, const vector<T, N>& b) {
  return add(a, accum<accfloat, N>(b));
}
template <typename T, unsigned N>
accum<accfloat, N> sub(const accum<accfloat, N>& a, const vector<T, N>& b) {
  const accum<accfloat, N> other(b);
  return host::accumulate<N>([&](unsigned i) { return a.data()[i] - other.data()[i]; });
}
template <typename T, unsigned N>
  requires host::is_one_of<T, float, std::int32_t>
vector<T, N> add(const vector<T, N>& a, const vector<T, N>& b) {
  return host::generate<N>([&](unsigned i) { return a.data()[i] + b.data()[i]; });
}
template <typename T, unsigned N>
  requires host::is_one_of<T, float, std::int32_t>
vector<T, N> sub(const vector<T, N>& a, const vector<T, N>& b) {
  return host::generate<N>([&](unsigned i) { return a.data()[i] - b.data()[i]; });
}
// By way of accumulators of 64 bits, from which the result is converted (detail/aie2/shift.hpp): it
// wraps only where saturation is off.
template <unsigned N>
vector<std::int32_t, N> upshift(const vector<std::int32_t, N>& v, unsigned shift) {
  const bool clamps = host::core_state.saturation == saturation_mode::saturate;
  return host::generate<N>([&](unsigned i) {
    using Limits = std::numeric_limits<std::int32_t>;
    const std::int64_t shifted = std::int64_t{v.data()[i]} * (std::int64_t{1} << shift);
    if (clamps && shifted > Limits::max()) return Limits::max();
    if (clamps && shifted < Limits::min()) return Limits::min();
    return static_cast<std::int32_t>(shifted);
  });
}

// Comparisons. On f32 they are emulated, in several instructions (detail/aie2/compare.hpp).
template <typename T, unsigned N>
vector<T, N> max(const vector<T, N>& a, const vector<T, N>& b) {
  return host::generate<N>(
      [&](unsigned i) { return a.data()[i] > b.data()[i] ? a.data()[i] : b.data()[i]; });
}
template <typename T, unsigned N>
vector<T, N> min(const vector<T, N>& a, const vector<T, N>& b) {
  return host::generate<N>(
      [&](unsigned i) { return a.data()[i] < b.data()[i] ? a.data()[i] : b.data()[i]; });
}
template <typename T, unsigned N>
mask<N> lt(const vector<T, N>& a, const vector<T, N>& b) {
  mask<N> m;
  for (unsigned i = 0; i < N; ++i) m.set[i] = a.data()[i] < b.data()[i];
  return m;
}
// b where the mask is set, else a.
template <typename T, unsigned N>
vector<T, N> select(const vector<T, N>& a, const vector<T, N>& b, const mask<N>& m) {
  return host::generate<N>([&](unsigned i) { return m.set[i] ? b.data()[i] : a.data()[i]; });
}

// Reductions. The order of the additions is not specified; here halves are added to each other.
template <unsigned N>
float reduce_add(const vector<float, N>& v) {
  std::array<float, N> sums;
  std::memcpy(sums.data(), v.data(), sizeof(sums));
  for (unsigned half = N / 2; half > 0; half /= 2) {
    for (unsigned i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
}
template <typename T, unsigned N>
T reduce_max(const vector<T, N>& v) {
  T largest = v.data()[0];
  for (unsigned i = 1; i < N; ++i) largest = largest < v.data()[i] ? v.data()[i] : largest;
  return largest;
}
template <typename T, unsigned N>
T reduce_min(const vector<T, N>& v) {
  T smallest = v.data()[0];
  for (unsigned i = 1; i < N; ++i) smallest = v.data()[i] < smallest ? v.data()[i] : smallest;
  return smallest;
}

// Rearrangement.
template <typename T, unsigned N>
vector<T, N> transpose(const vector<T, N>& v, unsigned rows, unsigned columns) {
  if (rows * columns != N) throw host::Trap("expected rows x columns to be the vector's elements");
  return host::generate<N>([&](unsigned i) { return v.data()[i % rows * columns + i / rows]; });
}
template <typename T, unsigned N>
std::pair<vector<T, N>, vector<T, N>> interleave_zip(const vector<T, N>& a, const vector<T, N>& b,
                                                     unsigned chunk) {
  const auto at = [&](unsigned i) {
    const unsigned pair = i / (2 * chunk);
    const unsigned from = pair * chunk + i % chunk;
    return i / chunk % 2 == 0 ? a.data()[from] : b.data()[from];
  };
  return {host::generate<N>(at), host::generate<N>([&](unsigned i) { return at(N + i); })};
}
template <typename T, unsigned N>
vector<T, N / 2> filter_even(const vector<T, N>& v, unsigned chunk = 1) {
  return host::generate<N / 2>(
      [&](unsigned i) { return v.data()[i / chunk * 2 * chunk + i % chunk]; });
}
template <typename T, unsigned N>
vector<T, N / 2> filter_odd(const vector<T, N>& v, unsigned chunk = 1) {
  return host::generate<N / 2>(
      [&](unsigned i) { return v.data()[(i / chunk * 2 + 1) * chunk + i % chunk]; });
}

}  // namespace FLOWNPU_AIE_ARCHITECTURE
}  // namespace aie
