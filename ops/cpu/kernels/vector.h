// SPDX-License-Identifier: Apache-2.0
// A vector of f32 as wide as the instruction set this file is compiled for, in the compiler's own
// vector extension. Everything here has internal linkage, because the same names are compiled for
// several instruction sets, which the linker must keep apart.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

// Vector registers that the instruction set has.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif

typedef float Vector __attribute__((vector_size(kLanes * 4)));
typedef std::int32_t Integers __attribute__((vector_size(kLanes * 4)));
typedef std::uint32_t Bits __attribute__((vector_size(kLanes * 4)));
typedef std::int8_t Bytes __attribute__((vector_size(kLanes)));
typedef std::int16_t Shorts __attribute__((vector_size(kLanes * 2)));
typedef std::uint16_t Halves __attribute__((vector_size(kLanes * 2)));

inline Vector broadcast(float x) { return x - Vector{}; }

inline Vector load(const float* x) {
  Vector v;
  std::memcpy(&v, x, sizeof(v));
  return v;
}

inline Integers load_integers(const std::int32_t* x) {
  Integers v;
  std::memcpy(&v, x, sizeof(v));
  return v;
}

// GCC 12 widens each byte by itself, in scalar registers; processors have one instruction.
inline Integers load_bytes(const std::int8_t* x) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
  return reinterpret_cast<Integers>(_mm512_cvtepi8_epi32(bytes));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(x));
  return reinterpret_cast<Integers>(_mm256_cvtepi8_epi32(bytes));
#else
  Bytes bytes;
  std::memcpy(&bytes, x, sizeof(bytes));
  return __builtin_convertvector(bytes, Integers);
#endif
}

// The low byte of each. By way of 16 bits: without AVX-512, GCC 12 converts 32 bits to 8 lane by
// lane.
inline void store_bytes(std::int8_t* x, Integers v) {
  const Bytes bytes = __builtin_convertvector(__builtin_convertvector(v, Shorts), Bytes);
  std::memcpy(x, &bytes, sizeof(bytes));
}

inline void store(float* x, Vector v) { std::memcpy(x, &v, sizeof(v)); }

// The first `count` <= kLanes elements.
inline Vector load_some(const float* x, std::int64_t count) {
  if (count == kLanes) return load(x);
  float padded[kLanes] = {};
  std::memcpy(padded, x, static_cast<std::size_t>(count) * sizeof(float));
  return load(padded);
}

inline void store_some(float* y, Vector v, std::int64_t count) {
  if (count == kLanes) return store(y, v);
  std::memcpy(y, &v, static_cast<std::size_t>(count) * sizeof(float));
}

inline Vector select(Integers mask, Vector yes, Vector no) { return mask ? yes : no; }
// b if either is NaN. Intrinsics, because GCC 12 compiles the expression to two instructions, a
// comparison and a selection.
inline Vector max(Vector a, Vector b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}
inline Vector min(Vector a, Vector b) {
#if defined(__AVX512F__)
  return _mm512_min_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}

inline Vector magnitude(Vector v) {
  return reinterpret_cast<Vector>(reinterpret_cast<Integers>(v) & 0x7fffffff);
}

// The larger of two magnitudes by their bits. Bits have the same order, with NaN above infinity, so
// the largest of many is NaN if one is.
inline Vector larger_magnitude(Vector a, Vector b) {
  const auto x = reinterpret_cast<Integers>(a);
  const auto y = reinterpret_cast<Integers>(b);
  return reinterpret_cast<Vector>(x > y ? x : y);
}

// The nearest integer, ties to even, of |v| < 2^22: adding 1.5 * 2^23 leaves it in the low bits of
// the mantissa.
inline Vector round_to_integer(Vector v) {
  const Vector magic = broadcast(12582912.0F);
  return (v + magic) - magic;
}

// The nearest bf16, ties to even, in the low halves; NaN stays NaN.
inline Bits bf16_bits(Vector v) {
  const Bits bits = reinterpret_cast<Bits>(v);
  const Bits rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
  return (bits & 0x7fffffffU) > 0x7f800000U ? (bits >> 16) | 0x40U : rounded;
}

template <int DISTANCE, int... I>
inline Vector rotate(Vector v, std::integer_sequence<int, I...> /*lanes*/) {
  return __builtin_shufflevector(v, v, ((I + DISTANCE) % kLanes)...);
}

// Lanes from DISTANCE on come first.
template <int DISTANCE>
inline Vector rotate(Vector v) {
  return rotate<DISTANCE>(v, std::make_integer_sequence<int, kLanes>());
}

template <int DISTANCE = kLanes / 2>
inline float reduce_add(Vector v) {
  v += rotate<DISTANCE>(v);
  if constexpr (DISTANCE > 1) return reduce_add<DISTANCE / 2>(v);
  return v[0];
}

template <int DISTANCE = kLanes / 2>
inline float reduce_max(Vector v) {
  v = max(v, rotate<DISTANCE>(v));
  if constexpr (DISTANCE > 1) return reduce_max<DISTANCE / 2>(v);
  return v[0];
}

template <int DISTANCE = kLanes / 2>
inline float reduce_larger_magnitude(Vector v) {
  v = larger_magnitude(v, rotate<DISTANCE>(v));
  if constexpr (DISTANCE > 1) return reduce_larger_magnitude<DISTANCE / 2>(v);
  return v[0];
}

// bf16 is the upper half of f32.
inline float float_from_bf16(std::uint16_t x) {
  const std::uint32_t bits = static_cast<std::uint32_t>(x) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof(y));
  return y;
}

// Round to nearest even; NaN stays NaN.
inline std::uint16_t bf16_from_float(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  if ((bits & 0x7fffffffU) > 0x7f800000U) return static_cast<std::uint16_t>((bits >> 16) | 0x40U);
  bits += 0x7fffU + ((bits >> 16) & 1U);
  return static_cast<std::uint16_t>(bits >> 16);
}

inline float float_from_half(std::uint16_t x) {
  _Float16 half;
  std::memcpy(&half, &x, sizeof(half));
  return static_cast<float>(half);
}

inline std::uint16_t half_from_float(float x) {
  const auto half = static_cast<_Float16>(x);
  std::uint16_t bits;
  std::memcpy(&bits, &half, sizeof(bits));
  return bits;
}

struct TwoVectors {
  Vector first;
  Vector second;
};

// The elements of a Vector in double.
typedef double Doubles __attribute__((vector_size(kLanes * 4)));
struct TwoDoubles {
  Doubles first;
  Doubles second;
};

template <int... I>
inline TwoDoubles to_doubles(Vector v, std::integer_sequence<int, I...> /*lanes*/) {
  return {__builtin_convertvector(__builtin_shufflevector(v, v, I...), Doubles),
          __builtin_convertvector(__builtin_shufflevector(v, v, (I + kLanes / 2)...), Doubles)};
}
inline TwoDoubles to_doubles(Vector v) {
  return to_doubles(v, std::make_integer_sequence<int, kLanes / 2>());
}

template <int... I>
inline Vector from_doubles(TwoDoubles v, std::integer_sequence<int, I...> /*lanes*/) {
  typedef float Floats __attribute__((vector_size(kLanes * 2)));
  return __builtin_shufflevector(__builtin_convertvector(v.first, Floats),
                                 __builtin_convertvector(v.second, Floats), I...);
}
inline Vector from_doubles(TwoDoubles v) {
  return from_doubles(v, std::make_integer_sequence<int, kLanes>());
}

template <int... I>
inline TwoVectors even_and_odd(TwoVectors v, std::integer_sequence<int, I...> /*lanes*/) {
  return {__builtin_shufflevector(v.first, v.second, 2 * I...),
          __builtin_shufflevector(v.first, v.second, (2 * I + 1)...)};
}

template <int... I>
inline TwoVectors in_turn(TwoVectors v, std::integer_sequence<int, I...> /*lanes*/) {
  return {__builtin_shufflevector(v.first, v.second, (I / 2 + I % 2 * kLanes)...),
          __builtin_shufflevector(v.first, v.second, ((kLanes + I) / 2 + I % 2 * kLanes)...)};
}

// Elements with even indices first, then those with odd ones; and back.
inline TwoVectors even_and_odd(TwoVectors v) {
  return even_and_odd(v, std::make_integer_sequence<int, kLanes>());
}
inline TwoVectors in_turn(TwoVectors v) {
  return in_turn(v, std::make_integer_sequence<int, kLanes>());
}

// Elements of a KV cache or of a weight, by type. `load_two` reads 2 kLanes of them; where
// kEvenAndOdd is true, those with even indices come first.
struct Float {
  using Element = float;
  static constexpr bool kEvenAndOdd = false;
  static Vector load_vector(const Element* x) { return load(x); }
  static TwoVectors load_two(const Element* x) { return {load(x), load(x + kLanes)}; }
  static float load_one(const Element* x) { return *x; }
  static Element round(float x) { return x; }
};

struct BFloat16 {
  using Element = std::uint16_t;
  static constexpr bool kEvenAndOdd = true;
  // One instruction for each vector, where load_vector takes two.
  static TwoVectors load_two(const Element* x) {
    Bits pairs;
    std::memcpy(&pairs, x, sizeof(pairs));
    return {reinterpret_cast<Vector>(pairs << 16), reinterpret_cast<Vector>(pairs & 0xffff0000U)};
  }
  static Vector load_vector(const Element* x) {
    // GCC 12 compiles the conversion to six instructions; processors have one for it.
#if defined(__AVX512F__)
    const __m512i wide =
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
#elif defined(__AVX2__)
    const __m256i wide =
        _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
#else
    Halves halves;
    std::memcpy(&halves, x, sizeof(halves));
    const Bits bits = __builtin_convertvector(halves, Bits) << 16;
    return reinterpret_cast<Vector>(bits);
#endif
  }
  static float load_one(const Element* x) { return float_from_bf16(*x); }
  static Element round(float x) { return bf16_from_float(x); }
  static Halves round_vector(Vector v) { return __builtin_convertvector(bf16_bits(v), Halves); }
};

struct Half {
  using Element = std::uint16_t;
  static constexpr bool kEvenAndOdd = false;
  static TwoVectors load_two(const Element* x) { return {load_vector(x), load_vector(x + kLanes)}; }
  static Vector load_vector(const Element* x) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
#elif defined(__F16C__)
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
#elif defined(__aarch64__)
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x)));
#else
    float lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = float_from_half(x[i]);
    return load(lanes);
#endif
  }
  static float load_one(const Element* x) { return float_from_half(*x); }
  static Element round(float x) { return half_from_float(x); }
  static Halves round_vector(Vector v) {
#if defined(__AVX512F__)
    return reinterpret_cast<Halves>(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    return reinterpret_cast<Halves>(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
    return reinterpret_cast<Halves>(vcvt_f16_f32(v));
#else
    Halves halves;
    for (int i = 0; i < kLanes; ++i) halves[i] = half_from_float(v[i]);
    return halves;
#endif
  }
};

// Codes of a weight or of a KV cache's row; the caller multiplies them by their scale.
struct Int8 {
  using Element = std::int8_t;
  static Vector load_vector(const Element* x) {
    return __builtin_convertvector(load_bytes(x), Vector);
  }
  static float load_one(const Element* x) { return static_cast<float>(*x); }
};

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
