// SPDX-License-Identifier: Apache-2.0
// Planes of channels [channels][plane] become rows of pixels [pixels][channels]: squares of as many
// channels as a register has lanes are transposed in registers.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "ops/cpu/kernels/tables.h"
#include "ops/cpu/kernels/vector.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// Planes are far apart, so that a processor does not foresee that the next pixels of each are read:
// they are asked for 256 bytes ahead (Zen 5, 512 channels of 256 x 256 pixels, one thread: 8 GB/s,
// where 64 pixels of all channels, four lanes at a time, took turns at 3).
constexpr std::int64_t kAhead = 64;

// Lane i of a pair's first vector is a's, or, where i has the bit STEP, b's of STEP lanes before;
// the second vector has the rest.
template <int STEP, int... I>
void exchange(Vector& a, Vector& b, std::integer_sequence<int, I...> /*lanes*/) {
  const Vector first = __builtin_shufflevector(a, b, ((I & STEP) == 0 ? I : kLanes + I - STEP)...);
  b = __builtin_shufflevector(a, b, ((I & STEP) == 0 ? I + STEP : kLanes + I)...);
  a = first;
}

template <int STEP = 1>
void transpose_lanes(Vector (&square)[kLanes]) {
  if constexpr (STEP < kLanes) {
    for (int i = 0; i < kLanes; ++i) {
      if ((i & STEP) == 0)
        exchange<STEP>(square[i], square[i + STEP], std::make_integer_sequence<int, kLanes>());
    }
    transpose_lanes<STEP * 2>(square);
  }
}

void store_pixel(Vector v, std::int64_t channels, float* to) { store_some(to, v, channels); }
void store_pixel(Vector v, std::int64_t channels, std::uint16_t* to) {
  const Halves halves = BFloat16::round_vector(v);
  std::memcpy(to, &halves, static_cast<std::size_t>(channels) * sizeof(std::uint16_t));
}

// Inlined, so that with constant counts all loops are unrolled and the square stays in registers.
template <typename Element>
__attribute__((always_inline)) inline void turn_square(const float* planes, std::int64_t plane,
                                                       std::int64_t channels, std::int64_t pixels,
                                                       Element* to, std::int64_t row) {
  Vector square[kLanes] = {};
  for (std::int64_t i = 0; i < channels; ++i) {
    __builtin_prefetch(planes + i * plane + kAhead);
    square[i] = load_some(planes + i * plane, pixels);
  }
  transpose_lanes(square);
  for (std::int64_t i = 0; i < pixels; ++i) store_pixel(square[i], channels, to + i * row);
}

template <typename Element>
void turn(const float* planes, std::int64_t plane, std::int64_t channels, std::int64_t pixels,
          Element* to) {
  for (std::int64_t channel = 0; channel < channels; channel += kLanes) {
    const std::int64_t deep = std::min<std::int64_t>(kLanes, channels - channel);
    for (std::int64_t pixel = 0; pixel < pixels; pixel += kLanes) {
      const std::int64_t wide = std::min<std::int64_t>(kLanes, pixels - pixel);
      const float* from = planes + channel * plane + pixel;
      Element* square = to + pixel * channels + channel;
      if (deep == kLanes && wide == kLanes) {
        turn_square(from, plane, kLanes, kLanes, square, channels);
      } else {
        turn_square(from, plane, deep, wide, square, channels);
      }
    }
  }
}

void channels_last(const float* planes, std::int64_t plane, std::int64_t channels,
                   std::int64_t pixels, bool rounds, void* to) {
  if (rounds) {
    turn(planes, plane, channels, pixels, static_cast<std::uint16_t*>(to));
  } else {
    turn(planes, plane, channels, pixels, static_cast<float*>(to));
  }
}

}  // namespace

void fill_channels_last(Kernels& kernels) { kernels.channels_last = channels_last; }

}  // namespace flownpu::cpu::FLOWNPU_ISA
