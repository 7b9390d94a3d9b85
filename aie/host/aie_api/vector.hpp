// SPDX-License-Identifier: Apache-2.0
// aie::vector, mask, block_vector and accum: the registers of the vector unit.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>

#include "memory.hpp"

namespace aie {
inline namespace FLOWNPU_AIE_ARCHITECTURE {
namespace host {

template <typename T, typename... Ts>
inline constexpr bool is_one_of = (std::is_same_v<T, Ts> || ...);

template <typename T>
concept Element = is_one_of<T, bfloat16, float, std::int8_t, std::uint8_t, std::int16_t,
                            std::uint16_t, std::int32_t, std::uint32_t, uint4>;

// Registers have 128 to 1024 bits, and a vector takes up to 4 of the largest
// (detail/aie2/vector.hpp).
template <typename T, unsigned N>
inline constexpr bool is_register =
    N * bits_of<T> >= 128 && N * bits_of<T> <= 4096 && std::has_single_bit(N);

}  // namespace host

// mask.hpp, `class mask`: the results of a comparison, lane by lane; `select` takes its second
// operand where one is set.
template <unsigned N>
struct mask {
  std::array<bool, N> set{};
  static constexpr unsigned size() { return N; }
  // The lowest word holds the bits of the first 32 lanes.
  template <typename... Words>
  static mask from_uint32(Words... words) {
    static_assert(sizeof...(Words) == (N + 31) / 32, "expected one word for each 32 lanes");
    const std::uint32_t all[] = {words...};
    mask m;
    for (unsigned i = 0; i < N; ++i) m.set[i] = (all[i / 32] >> (i % 32) & 1U) != 0;
    return m;
  }
};

template <host::Element T, unsigned N>
class vector;

namespace host {
// Throws Trap unless a vector of `Whole` elements, cut into parts of `Part`, has a part `index`.
template <unsigned Whole, unsigned Part>
void check_part(unsigned index) {
  static_assert(Whole % Part == 0, "expected a part that divides the vector");
  if (index >= Whole / Part) {
    throw Trap("expected a part below " + std::to_string(Whole / Part) + ", got " +
               std::to_string(index));
  }
}
}  // namespace host

// vector.hpp, `class vector`.
template <host::Element T, unsigned N>
class vector {
  static_assert(host::is_register<T, N>,
                "expected a vector of 128 to 4096 bits and a power of two of elements");

 public:
  using value_type = T;
  static constexpr unsigned size() { return N; }

  vector() = default;

  T get(unsigned i) const { return data_[i]; }
  T operator[](unsigned i) const { return data_[i]; }
  void set(T value, unsigned i) { data_[i] = value; }

  template <unsigned Part>
  vector<T, Part> extract(unsigned index) const {
    host::check_part<N, Part>(index);
    vector<T, Part> part;
    std::memcpy(part.data(), data() + index * Part, Part * sizeof(T));
    return part;
  }
  template <unsigned Part>
  vector& insert(unsigned index, const vector<T, Part>& part) {
    host::check_part<N, Part>(index);
    std::memcpy(data() + index * Part, part.data(), Part * sizeof(T));
    return *this;
  }
  // The same bits as other elements. Element 2j of uint4 is the low half of byte j.
  template <typename To>
  auto cast_to() const {
    vector<To, N * host::bits_of<T> / host::bits_of<To>> to;
    if constexpr (std::is_same_v<To, uint4>) {
      static_assert(sizeof(T) == 1, "the host casts bytes to uint4");
      for (unsigned i = 0; i < N; ++i) {
        const auto byte = static_cast<std::uint8_t>(data_[i]);
        to.set(static_cast<uint4>(byte & 15), 2 * i);
        to.set(static_cast<uint4>(byte >> 4), 2 * i + 1);
      }
    } else {
      static_assert(!std::is_same_v<T, uint4>, "the host casts to uint4 only");
      std::memcpy(to.data(), data(), N * sizeof(T));
    }
    return to;
  }
  // Twice the bits an element: `unpacked_type` of detail/vector.hpp.
  auto unpack() const {
    using Wide = std::conditional_t<
        std::is_same_v<T, uint4>, std::uint8_t,
        std::conditional_t<std::is_same_v<T, std::uint8_t>, std::uint16_t, std::int16_t>>;
    static_assert(host::is_one_of<T, uint4, std::uint8_t, std::int8_t>);
    vector<Wide, N> wide;
    for (unsigned i = 0; i < N; ++i) wide.set(static_cast<Wide>(data_[i]), i);
    return wide;
  }

  // The host's own access, for the functions of these headers.
  T* data() { return data_.data(); }
  const T* data() const { return data_.data(); }

 private:
  std::array<T, N> data_;
};

// block_vector.hpp, `class block_vector`: N values in N/8 blocks.
template <typename T, unsigned N>
class block_vector {
  static_assert(std::is_same_v<T, bfp16ebs8>,
                "expected bfp16ebs8, the block type that is modelled");
  static_assert(host::is_xdna2<T>, "XDNA has no block floating point; bfp16ebs8 needs XDNA2");
  static_assert(N == 64 || N == 128, "expected 64 or 128 values");

 public:
  static constexpr unsigned size() { return N; }
  std::array<bfp16ebs8, N / 8> blocks;
};

namespace host {
template <typename Tag>
struct Accumulated;
template <>
struct Accumulated<accfloat> {
  using type = float;
};
template <>
struct Accumulated<acc32> {
  using type = std::int32_t;
};

// Vectors of four lanes, which compilers for all machines support. Without them, compilers make
// scalar code of the loops below.
typedef float Floats __attribute__((vector_size(16)));
typedef std::int32_t Integers __attribute__((vector_size(16)));

// The factor from a block's values to its mantissas: 2^(133 - exponent). Below an exponent of 6 it
// is no normal float; it is then 0, which makes all mantissas 0.
inline float units_of(std::uint8_t exponent) {
  const int scale_exponent = 127 + 133 - exponent;
  return scale_exponent > 254
             ? 0.0F
             : std::bit_cast<float>(static_cast<std::uint32_t>(scale_exponent) << 23);
}
// The value of a mantissa of 1: 2^(exponent - 133). Below 2^-126 it is a subnormal float, in units
// of 2^-149.
inline float unit_of(std::uint8_t exponent) {
  const std::uint32_t e = exponent;
  return std::bit_cast<float>(e > 6 ? (e - 6) << 23 : 1u << (e + 16));
}

// Eight f32 as a block: the largest value's exponent, which is returned, and mantissas of 8 bits
// (two's complement) in units of 2^(exponent - 127 - 6), so that the largest lies in [64, 128).
// It is not published how the hardware rounds a number to 128; this saturates to 127, an error of
// one unit at most.
inline std::uint8_t mantissas_of(const float* values, rounding_mode mode, Integers* mantissas) {
  Floats numbers[2];
  std::memcpy(numbers, values, sizeof(numbers));
  Integers magnitudes[2];
  for (int i = 0; i < 2; ++i)
    magnitudes[i] = std::bit_cast<Integers>(numbers[i]) & std::int32_t{0x7fffffff};
  const Integers larger = magnitudes[0] > magnitudes[1] ? magnitudes[0] : magnitudes[1];
  const auto largest = std::max(std::max(larger[0], larger[1]), std::max(larger[2], larger[3]));
  const auto exponent = static_cast<std::uint8_t>(largest >> 23);
  const float scale = units_of(exponent);
  for (Floats& of : numbers) of = of * scale;
  if (mode == rounding_mode::conv_even) {
    // Floats of this size are 1 apart: added and subtracted again, it rounds numbers below 2^22 in
    // magnitude to integers.
    constexpr float kIntegers = 0x1.8p23F;
    for (Floats& of : numbers) of = (of + kIntegers) - kIntegers;
  } else {
    for (Floats& of : numbers) {
      for (int lane = 0; lane < 4; ++lane) of[lane] = round_to_integer(of[lane], mode);
    }
  }
  for (int i = 0; i < 2; ++i) {
    const Floats most = Floats{} + 127.0F;
    const Floats least = Floats{} - 128.0F;
    numbers[i] = numbers[i] > most ? most : numbers[i];
    numbers[i] = numbers[i] < least ? least : numbers[i];
    // A NaN becomes some integer, whose low byte is taken.
    mantissas[i] = __builtin_convertvector(numbers[i], Integers) << 24 >> 24;
  }
  return exponent;
}

inline bfp16ebs8 to_block(const float* values, rounding_mode mode) {
  Integers mantissas[2];
  bfp16ebs8 block{.exponent = mantissas_of(values, mode, mantissas), .mantissa = {}};
  for (int i = 0; i < 8; ++i) block.mantissa[i] = static_cast<std::int8_t>(mantissas[i / 4][i % 4]);
  return block;
}

inline void from_block(const bfp16ebs8& block, float* values) {
  const float unit = unit_of(block.exponent);
  for (int i = 0; i < 8; ++i) values[i] = static_cast<float>(block.mantissa[i]) * unit;
}

// Rounds eight values to a block of block floating point.
inline void through_block(float* values, rounding_mode mode) {
  Integers mantissas[2];
  const float unit = unit_of(mantissas_of(values, mode, mantissas));
  for (const Integers& four : mantissas) {
    const Floats held = __builtin_convertvector(four, Floats) * unit;
    std::memcpy(values, &held, sizeof(held));
    values += 4;
  }
}
}  // namespace host

// accum.hpp, `class accum`. accfloat is f32; acc32 is int32.
template <typename Tag, unsigned N>
class accum {
  static_assert(N >= 8 && N <= 128 && std::has_single_bit(N),
                "expected an accumulator of 8 to 128 lanes, a power of two");

 public:
  using value_type = Tag;
  using Value = typename host::Accumulated<Tag>::type;
  static constexpr unsigned size() { return N; }

  accum() = default;
  template <typename T>
  explicit accum(const vector<T, N>& v) {
    from_vector(v);
  }

  // Exact: every element type that is allowed fits.
  template <typename T>
  void from_vector(const vector<T, N>& v) {
    if constexpr (std::is_same_v<Tag, accfloat>) {
      static_assert(host::is_one_of<T, float, bfloat16>, "accfloat takes float or bfloat16");
    } else {
      static_assert(std::is_integral_v<T>, "acc32 takes integers");
    }
    for (unsigned i = 0; i < N; ++i) data_[i] = static_cast<Value>(v.data()[i]);
  }
  // Rounds by the core's mode; integers are shifted right first, and saturate where that is set.
  template <typename T>
  auto to_vector(int shift = 0) const {
    if constexpr (std::is_same_v<T, bfp16ebs8>) {
      static_assert(std::is_same_v<Tag, accfloat>);
      block_vector<T, N> v;
      for (unsigned i = 0; i < N / 8; ++i)
        v.blocks[i] = host::to_block(data() + 8 * i, host::core_state.rounding);
      return v;
    } else {
      vector<T, N> v;
      if constexpr (host::is_one_of<T, bfloat16> && host::is_one_of<Tag, accfloat>) {
        // Read once, so that the loop can be vectorised.
        const rounding_mode mode = host::core_state.rounding;
        for (unsigned i = 0; i < N; ++i) v.data()[i].bits = host::round_to_bf16(data_[i], mode);
      } else {
        for (unsigned i = 0; i < N; ++i) v.data()[i] = convert<T>(data_[i], shift);
      }
      return v;
    }
  }

  template <unsigned Part>
  accum<Tag, Part> extract(unsigned index) const {
    host::check_part<N, Part>(index);
    accum<Tag, Part> part;
    std::memcpy(part.data(), data() + index * Part, Part * sizeof(Value));
    return part;
  }
  template <unsigned Part>
  accum& insert(unsigned index, const accum<Tag, Part>& part) {
    host::check_part<N, Part>(index);
    std::memcpy(data() + index * Part, part.data(), Part * sizeof(Value));
    return *this;
  }

  Value* data() { return data_.data(); }
  const Value* data() const { return data_.data(); }

 private:
  template <typename T>
  static T convert(Value value, int shift) {
    if constexpr (std::is_same_v<Tag, accfloat>) {
      static_assert(host::is_one_of<T, float, bfloat16>, "accfloat gives float or bfloat16");
      if constexpr (std::is_same_v<T, float>) return value;
      bfloat16 rounded;
      rounded.bits = host::round_to_bf16(value, host::core_state.rounding);
      if constexpr (std::is_same_v<T, bfloat16>) return rounded;
    } else {
      static_assert(std::is_integral_v<T>, "acc32 gives integers");
      const double shifted = std::ldexp(static_cast<double>(value), -shift);
      const double rounded =
          host::core_state.rounding == rounding_mode::conv_even ? std::nearbyint(shifted)
          : host::core_state.rounding == rounding_mode::floor   ? std::floor(shifted)
                                                                : std::trunc(shifted);
      if (host::core_state.saturation == saturation_mode::saturate) {
        constexpr double kLow = std::numeric_limits<T>::min();
        constexpr double kHigh = std::numeric_limits<T>::max();
        return static_cast<T>(rounded < kLow ? kLow : rounded > kHigh ? kHigh : rounded);
      }
      return static_cast<T>(static_cast<std::int64_t>(rounded));
    }
  }

  std::array<Value, N> data_;
};

}  // namespace FLOWNPU_AIE_ARCHITECTURE
}  // namespace aie
