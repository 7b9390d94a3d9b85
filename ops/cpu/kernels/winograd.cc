// SPDX-License-Identifier: Apache-2.0
// The transforms of convolutions of 3 x 3 taps whose tiles d give 2 x 2 pixels
//   y = A^T [(G g G^T) * (B^T d B)] A.
// Tiles of 4 x 4 pixels are Winograd's F(2 x 2, 3 x 3) (Lavin and Gray, arXiv:1509.09308), tiles of
// 3 x 3 those around one pixel of an image that is read twice as large (images/winograd.h).
// Channels are in the lanes.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "ops/cpu/kernels/tables.h"
#include "ops/cpu/kernels/vector.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// B^T d, for a column d of 4 or 3.
inline void transform_input(Vector& a, Vector& b, Vector& c, Vector& d) {
  const Vector first = a - c;
  const Vector second = b + c;
  const Vector third = c - b;
  d = b - d;
  a = first;
  b = second;
  c = third;
}
inline void transform_input(Vector& a, const Vector& b, Vector& c) {
  a -= b;
  c -= b;
}

// A^T p, for a column p of 4 or 3.
struct Two {
  Vector first;
  Vector second;
};
inline Two transform_output(const Vector (&p)[4]) {
  return {p[0] + p[1] + p[2], p[1] - p[2] - p[3]};
}
inline Two transform_output(const Vector (&p)[3]) { return {p[0] + p[1], p[1] + p[2]}; }

inline void store_rounded(Vector v, std::int64_t count, std::uint16_t* to) {
#if defined(__AVX512BF16__)
  const Halves halves = (Halves)_mm512_cvtneps_pbh(v);
#else
  const Halves halves = BFloat16::round_vector(v);
#endif
  std::memcpy(to, &halves, static_cast<std::size_t>(count) * sizeof(std::uint16_t));
}

// to[side^2 * stride] for some channels.
template <int kSide, typename Element>
void transform_tile(const float* const* pixels, std::int64_t channel, std::int64_t count,
                    Element* to, std::int64_t stride) {
  Vector d[kSide][kSide];
  for (int i = 0; i < kSide; ++i) {
    for (int j = 0; j < kSide; ++j) d[i][j] = load_some(pixels[i * kSide + j] + channel, count);
  }
  if constexpr (kSide == 4) {
    for (int j = 0; j < kSide; ++j) transform_input(d[0][j], d[1][j], d[2][j], d[3][j]);
    for (auto& row : d) transform_input(row[0], row[1], row[2], row[3]);
  } else {
    for (int j = 0; j < kSide; ++j) transform_input(d[0][j], d[1][j], d[2][j]);
    for (auto& row : d) transform_input(row[0], row[1], row[2]);
  }
  for (int i = 0; i < kSide; ++i) {
    for (int j = 0; j < kSide; ++j, to += stride) {
      if constexpr (sizeof(Element) == sizeof(float)) {
        store_some(to, d[i][j], count);
      } else {
        store_rounded(d[i][j], count, to);
      }
    }
  }
}

template <int kSide, typename Element>
void transform_tiles(const float* const* pixels, std::int64_t channels, std::int64_t padded,
                     Element* to, std::int64_t stride) {
  std::int64_t c = 0;
  for (; c + kLanes <= channels; c += kLanes)
    transform_tile<kSide>(pixels, c, kLanes, to + c, stride);
  if (c < channels) transform_tile<kSide>(pixels, c, channels - c, to + c, stride);
  for (int i = 0; channels < padded && i < kSide * kSide; ++i)
    std::fill(to + i * stride + channels, to + i * stride + padded, Element{});
}

template <int kSide>
void winograd_input(const float* const* pixels, std::int64_t channels, std::int64_t padded,
                    bool rounds, void* to, std::int64_t stride) {
  if (rounds) {
    transform_tiles<kSide>(pixels, channels, padded, static_cast<std::uint16_t*>(to), stride);
  } else {
    transform_tiles<kSide>(pixels, channels, padded, static_cast<float*>(to), stride);
  }
}

template <int kSide>
void winograd_output(const float* products, std::int64_t stride, std::int64_t tiles, float* lines) {
  const std::int64_t line = 2 * tiles * kDenseColumns;
  for (std::int64_t tile = 0; tile < tiles; ++tile, lines += 2 * kDenseColumns) {
    for (std::int64_t c = 0; c < kDenseColumns; c += kLanes) {
      const float* from = products + tile * kDenseColumns + c;
      Vector sums[2][kSide];
      for (int j = 0; j < kSide; ++j) {
        Vector column[kSide];
        for (int i = 0; i < kSide; ++i) column[i] = load(from + (i * kSide + j) * stride);
        const Two two = transform_output(column);
        sums[0][j] = two.first;
        sums[1][j] = two.second;
      }
      for (int i = 0; i < 2; ++i) {
        const Two two = transform_output(sums[i]);
        store(lines + i * line + c, two.first);
        store(lines + i * line + kDenseColumns + c, two.second);
      }
    }
  }
}

}  // namespace

void fill_winograd(Kernels& kernels) {
  kernels.winograd = {winograd_input<4>, winograd_output<4>};
  kernels.winograd_of_upsampled = {winograd_input<3>, winograd_output<3>};
}

}  // namespace flownpu::cpu::FLOWNPU_ISA
