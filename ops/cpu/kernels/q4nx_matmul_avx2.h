// SPDX-License-Identifier: Apache-2.0
// FusedDQP and Q4NXMatMul in AVX2 + FMA: for few rows of activations, codes meet them in registers;
// for many, codes are unpacked once for all rows.
//
// Layout: 8 bytes of a column are the 8 row pairs of a strip: low nibble row 2i, high nibble row
// 2i+1. Lane i of a register holds the row pair i, so that a strip of 16 rows is a pair {even rows,
// odd rows} of 8 lanes, and scales and minima, bf16 [row], split the same way. int8 activations:
// a lane has four columns, a byte each. bf16: a lane has one column in f32 (AVX2 has no bf16
// products).
//
// Dataflow for many rows, for each stretch of columns whose unpacked codes fill half of an L1 data
// cache: unpack 32 rows of codes; then for each tile of rows of activations and each strip: the
// totals come from `out`, each group's dots are accumulated in registers and scaled into them, and
// they go back. The order of operations for one result does not depend on the number of rows in a
// call, so neither do its bits.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "ops/cpu/kernels.h"
#include "ops/cpu/kernels/vector.h"
#include "ops/q4nx.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

constexpr int kStrips = 2;
constexpr int kStripRows = 16;
constexpr std::int64_t kGroup = q4nx::kGroup;

// Up to this many rows of activations meet the codes without a detour through the scratch.
constexpr int kFusedRows = 4;
// Rows of activations in registers: with 4 the dots of a strip are 8 of 16 registers, which leaves
// some for weights, activations and products. As each step is two instructions on 8 dots and 6
// loads, more rows would not make it faster.
constexpr int kTileInt8 = 4;
// 12 dots: a fused multiply-add has a latency of 4 to 5 cycles, and two are begun in each.
constexpr int kTileBFloat16 = 6;
// Half of an L1 data cache of 32 KB: unpacked codes of 512 columns in bytes, or of 128 in f32.
constexpr std::int64_t kUnpackedBytes = 16 * 1024;
static_assert(kUnpackedBytes <= static_cast<std::int64_t>(kMatMulScratchBytes));
constexpr std::int64_t kInt8Groups = kUnpackedBytes / (q4nx::kBlockRows * kGroup);
constexpr std::int64_t kBFloat16Groups = kInt8Groups / static_cast<int>(sizeof(float));

// 16 rows in f32: rows 0, 2, .., 14 and rows 1, 3, .., 15 of a strip.
struct Rows {
  __m256 even = _mm256_setzero_ps();
  __m256 odd = _mm256_setzero_ps();
};

inline __m256i load_bytes(const void* bytes) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(bytes));
}

inline Rows load_group_rows(const std::uint8_t* bf16) {
  const __m256i pairs = load_bytes(bf16);
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000U));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)),
          _mm256_castsi256_ps(_mm256_and_si256(pairs, high))};
}

inline void store_rows(Rows rows, float* out) {
  const __m256 low = _mm256_unpacklo_ps(rows.even, rows.odd);
  const __m256 high = _mm256_unpackhi_ps(rows.even, rows.odd);
  _mm256_storeu_ps(out, _mm256_permute2f128_ps(low, high, 0x20));
  _mm256_storeu_ps(out + 8, _mm256_permute2f128_ps(low, high, 0x31));
}

inline Rows load_rows(const float* in) {
  const __m256 first = _mm256_loadu_ps(in);
  const __m256 second = _mm256_loadu_ps(in + 8);
  const __m256 low = _mm256_permute2f128_ps(first, second, 0x20);
  const __m256 high = _mm256_permute2f128_ps(first, second, 0x31);
  return {_mm256_shuffle_ps(low, high, 0x88), _mm256_shuffle_ps(low, high, 0xdd)};
}

// One group of 32 columns of all 32 rows.
struct GroupBytes {
  const std::uint8_t* parameters;
  const std::uint8_t* first_codes;

  GroupBytes(const std::uint8_t* blocks, std::int64_t group) {
    const std::int64_t within = group % q4nx::kGroupsPerBlock;
    const std::uint8_t* block = blocks + group / q4nx::kGroupsPerBlock * q4nx::kBlockBytes;
    parameters = block + within * q4nx::kBlockRows * 2;
    first_codes = block + q4nx::kCodeOffset + within * kGroup * q4nx::kColumnBytes;
  }
  const std::uint8_t* codes(int strip) const { return first_codes + strip * q4nx::kStripBytes; }
  Rows scale(int strip) const { return load_group_rows(parameters + strip * kStripRows * 2); }
  Rows minimum(int strip) const {
    return load_group_rows(parameters + q4nx::kMinimumOffset + strip * kStripRows * 2);
  }
};

// Fetches an eighth of the block that is two ahead, past the outer caches, which hold what is read
// again. The weight is fetched in the order of its bytes, whatever the order of their use: so, on a
// Zen 5, two threads multiplied one row of activations at 42-45 GB/s; group by group, or jumping
// over the padding of K = 1152, at 30-38, and without at 31-35.
inline void prefetch_group(const std::uint8_t* blocks, std::int64_t group) {
  constexpr std::int64_t kLine = 64;
  constexpr std::int64_t kBytes = q4nx::kBlockBytes / q4nx::kGroupsPerBlock;
  const std::uint8_t* ahead = blocks + 2 * q4nx::kBlockBytes + group * kBytes;
  for (std::int64_t line = 0; line < kBytes; line += kLine) {
    _mm_prefetch(reinterpret_cast<const char*>(ahead + line), _MM_HINT_NTA);
  }
}

// total += dot * scale + minimum * (sum of activations): eq. 3 taken out of the sum over a group.
inline void add_group(Rows& total, Rows dot, Rows scale, Rows minimum, float sum) {
  const __m256 s = _mm256_set1_ps(sum);
  total.even = _mm256_fmadd_ps(minimum.even, s, _mm256_fmadd_ps(dot.even, scale.even, total.even));
  total.odd = _mm256_fmadd_ps(minimum.odd, s, _mm256_fmadd_ps(dot.odd, scale.odd, total.odd));
}

// Codes of four columns as bytes.
struct ByteCodes {
  __m256i even;
  __m256i odd;
};

// 4 columns of 8 bytes -> lane i: row pair i of 4 columns. First the two halves of each column are
// parted, so that each 128-bit half holds 4 row pairs of all 4 columns, then each half is
// transposed.
inline ByteCodes byte_codes(const std::uint8_t* codes) {
  const __m256i halves = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
  const __m256i transpose = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  const __m256i nibble = _mm256_set1_epi8(0x0f);
  const __m256i parted = _mm256_permutevar8x32_epi32(load_bytes(codes), halves);
  const __m256i bytes = _mm256_shuffle_epi8(parted, transpose);
  return {_mm256_and_si256(bytes, nibble), _mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble)};
}

// The dots of a strip's unsigned codes with signed activations, in 16 bits, two for each row
// (columns 0, 1 and 2, 3 of four). A group makes each a sum of 8 times two products of at most 15 x
// 127: 30480, below 32767, where vpmaddubsw and 16-bit sums end. So the step to 32 bits is one a
// group.
struct IntegerRows {
  __m256i even = _mm256_setzero_si256();
  __m256i odd = _mm256_setzero_si256();
};
static_assert(kGroup / 4 * 2 * 15 * 127 <= 32767);

inline void dot_int8(IntegerRows& dot, ByteCodes codes, const std::int8_t* x) {
  std::int32_t four;
  std::memcpy(&four, x, sizeof(four));
  const __m256i columns = _mm256_set1_epi32(four);
  dot.even = _mm256_add_epi16(dot.even, _mm256_maddubs_epi16(codes.even, columns));
  dot.odd = _mm256_add_epi16(dot.odd, _mm256_maddubs_epi16(codes.odd, columns));
}

inline __m256 scaled(__m256i dot, __m256 scale) {
  const __m256i both = _mm256_madd_epi16(dot, _mm256_set1_epi16(1));
  return _mm256_mul_ps(_mm256_cvtepi32_ps(both), scale);
}

inline void add_group(Rows& total, IntegerRows dot, float activation_scale, Rows scale,
                      Rows minimum, float sum) {
  const __m256 s = _mm256_set1_ps(activation_scale);
  add_group(total, Rows{scaled(dot.even, s), scaled(dot.odd, s)}, scale, minimum, sum);
}

// Codes of one column in f32.
inline Rows float_codes(const std::uint8_t* codes) {
  const __m256i bytes =
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
  return {_mm256_cvtepi32_ps(_mm256_and_si256(bytes, _mm256_set1_epi32(0x0f))),
          _mm256_cvtepi32_ps(_mm256_srli_epi32(bytes, 4))};
}

inline void dot_float(Rows& dot, Rows codes, const float* x) {
  const __m256 column = _mm256_broadcast_ss(x);
  dot.even = _mm256_fmadd_ps(codes.even, column, dot.even);
  dot.odd = _mm256_fmadd_ps(codes.odd, column, dot.odd);
}

// The rounded activations of some rows in f32, [row][columns], n of each: n is a multiple of 8.
inline void widen(const RoundedActivations& a, std::int64_t row, std::int64_t rows,
                  std::int64_t column, std::int64_t n, float* out) {
  for (std::int64_t r = 0; r < rows; ++r, out += n) {
    const auto* x = static_cast<const std::uint16_t*>(a.values) + (row + r) * a.padded_k + column;
    for (std::int64_t i = 0; i < n; i += kLanes) store(out + i, BFloat16::load_vector(x + i));
  }
}

template <int COUNT>
void store_strips(const Rows (&total)[kStrips][COUNT], float* out) {
  for (int strip = 0; strip < kStrips; ++strip) {
    for (int r = 0; r < COUNT; ++r) {
      store_rows(total[strip][r], out + r * q4nx::kBlockRows + strip * kStripRows);
    }
  }
}

// The pragmas below are to keep GCC from unrolling a group's loop whole: it then adds the products
// in an order of its own, which no 16 registers can hold (a quarter of the speed in tile_int8).

template <int COUNT>
void fused_int8(const std::uint8_t* blocks, const RoundedActivations& a, std::int64_t first,
                float* out) {
  const auto* x = static_cast<const std::int8_t*>(a.values) + first * a.padded_k;
  const float* scales = a.scales + first * a.groups;
  const float* sums = a.sums + first * a.groups;
  Rows total[kStrips][COUNT];
  for (std::int64_t group = 0; group < a.groups; ++group, x += kGroup, ++scales, ++sums) {
    const GroupBytes bytes(blocks, group);
    prefetch_group(blocks, group);
    for (int strip = 0; strip < kStrips; ++strip) {
      IntegerRows dot[COUNT];
#pragma GCC unroll 2
      for (int quad = 0; quad < kGroup / 4; ++quad) {
        const ByteCodes codes = byte_codes(bytes.codes(strip) + quad * 4 * q4nx::kColumnBytes);
        for (int r = 0; r < COUNT; ++r) dot_int8(dot[r], codes, x + r * a.padded_k + quad * 4);
      }
      const Rows scale = bytes.scale(strip);
      const Rows minimum = bytes.minimum(strip);
      for (int r = 0; r < COUNT; ++r) {
        const std::int64_t at = r * a.groups;
        add_group(total[strip][r], dot[r], scales[at], scale, minimum, sums[at]);
      }
    }
  }
  store_strips(total, out);
}

template <int COUNT>
void fused_bf16(const std::uint8_t* blocks, const RoundedActivations& a, std::int64_t first,
                float* out) {
  const float* sums = a.sums + first * a.groups;
  Rows total[kStrips][COUNT];
  for (std::int64_t group = 0; group < a.groups; ++group, ++sums) {
    const GroupBytes bytes(blocks, group);
    prefetch_group(blocks, group);
    alignas(32) float x[COUNT * kGroup];
    widen(a, first, COUNT, group * kGroup, kGroup, x);
    for (int strip = 0; strip < kStrips; ++strip) {
      Rows dot[COUNT];
      for (int column = 0; column < kGroup; ++column) {
        const Rows codes = float_codes(bytes.codes(strip) + column * q4nx::kColumnBytes);
        for (int r = 0; r < COUNT; ++r) dot_float(dot[r], codes, x + r * kGroup + column);
      }
      const Rows scale = bytes.scale(strip);
      const Rows minimum = bytes.minimum(strip);
      for (int r = 0; r < COUNT; ++r) {
        add_group(total[strip][r], dot[r], scale, minimum, sums[r * a.groups]);
      }
    }
  }
  store_strips(total, out);
}

// Groups whose codes are unpacked together: scratch [strip][columns or quadruples of them][even,
// odd].
struct Stretch {
  const std::uint8_t* blocks;
  std::int64_t first_group;
  std::int64_t groups;
};

inline void unpack_int8(const Stretch& stretch, std::byte* unpacked) {
  for (int strip = 0; strip < kStrips; ++strip) {
    for (std::int64_t g = 0; g < stretch.groups; ++g) {
      const std::uint8_t* codes = GroupBytes(stretch.blocks, stretch.first_group + g).codes(strip);
      for (int quad = 0; quad < kGroup / 4; ++quad) {
        const ByteCodes four = byte_codes(codes + quad * 4 * q4nx::kColumnBytes);
        _mm256_store_si256(reinterpret_cast<__m256i*>(unpacked), four.even);
        _mm256_store_si256(reinterpret_cast<__m256i*>(unpacked + 32), four.odd);
        unpacked += 64;
      }
    }
  }
}

inline void unpack_float(const Stretch& stretch, float* unpacked) {
  for (int strip = 0; strip < kStrips; ++strip) {
    for (std::int64_t g = 0; g < stretch.groups; ++g) {
      const std::uint8_t* codes = GroupBytes(stretch.blocks, stretch.first_group + g).codes(strip);
      for (int column = 0; column < kGroup; ++column) {
        const Rows one = float_codes(codes + column * q4nx::kColumnBytes);
        _mm256_store_ps(unpacked, one.even);
        _mm256_store_ps(unpacked + 8, one.odd);
        unpacked += 16;
      }
    }
  }
}

// COUNT rows of activations from `row` times a stretch of one strip; `out` is the strip's.
template <int COUNT>
void tile_int8(const Stretch& stretch, const std::byte* unpacked, int strip,
               const RoundedActivations& a, std::int64_t row, float* out) {
  const std::int64_t first = stretch.first_group;
  const auto* x = static_cast<const std::int8_t*>(a.values) + row * a.padded_k + first * kGroup;
  const float* scales = a.scales + row * a.groups + first;
  const float* sums = a.sums + row * a.groups + first;
  Rows total[COUNT];
  if (first > 0) {
    for (int r = 0; r < COUNT; ++r) total[r] = load_rows(out + r * q4nx::kBlockRows);
  }
  for (std::int64_t g = 0; g < stretch.groups; ++g, ++scales, ++sums) {
    IntegerRows dot[COUNT];
#pragma GCC unroll 4
    for (int quad = 0; quad < kGroup / 4; ++quad, unpacked += 64, x += 4) {
      const ByteCodes codes{load_bytes(unpacked), load_bytes(unpacked + 32)};
      for (int r = 0; r < COUNT; ++r) dot_int8(dot[r], codes, x + r * a.padded_k);
    }
    const GroupBytes bytes(stretch.blocks, first + g);
    const Rows scale = bytes.scale(strip);
    const Rows minimum = bytes.minimum(strip);
    for (int r = 0; r < COUNT; ++r) {
      add_group(total[r], dot[r], scales[r * a.groups], scale, minimum, sums[r * a.groups]);
    }
  }
  for (int r = 0; r < COUNT; ++r) store_rows(total[r], out + r * q4nx::kBlockRows);
}

// Likewise; `x` has the activations in f32, [COUNT][columns of the stretch].
template <int COUNT>
void tile_float(const Stretch& stretch, const float* unpacked, int strip,
                const RoundedActivations& a, std::int64_t row, const float* x, float* out) {
  const std::int64_t first = stretch.first_group;
  const std::int64_t columns = stretch.groups * kGroup;
  const float* sums = a.sums + row * a.groups + first;
  Rows total[COUNT];
  if (first > 0) {
    for (int r = 0; r < COUNT; ++r) total[r] = load_rows(out + r * q4nx::kBlockRows);
  }
  for (std::int64_t g = 0; g < stretch.groups; ++g, ++sums) {
    Rows dot[COUNT];
    for (int column = 0; column < kGroup; ++column, unpacked += 16, ++x) {
      const Rows codes{_mm256_load_ps(unpacked), _mm256_load_ps(unpacked + 8)};
      for (int r = 0; r < COUNT; ++r) dot_float(dot[r], codes, x + r * columns);
    }
    const GroupBytes bytes(stretch.blocks, first + g);
    const Rows scale = bytes.scale(strip);
    const Rows minimum = bytes.minimum(strip);
    for (int r = 0; r < COUNT; ++r) {
      add_group(total[r], dot[r], scale, minimum, sums[r * a.groups]);
    }
  }
  for (int r = 0; r < COUNT; ++r) store_rows(total[r], out + r * q4nx::kBlockRows);
}

// Calls function.template operator()<N>() for a count of 1 .. LARGEST.
template <int LARGEST, typename Function>
void with_count(std::int64_t count, const Function& function) {
  if constexpr (LARGEST > 1) {
    if (count < LARGEST) return with_count<LARGEST - 1>(count, function);
  }
  function.template operator()<LARGEST>();
}

inline void matmul_int8(const std::uint8_t* blocks, std::int64_t /*k*/, const RoundedActivations& a,
                        std::int64_t first, std::int64_t count, std::byte* scratch, float* out) {
  if (count <= kFusedRows) {
    return with_count<kFusedRows>(count,
                                  [&]<int COUNT>() { fused_int8<COUNT>(blocks, a, first, out); });
  }
  for (std::int64_t group = 0; group < a.filled_groups; group += kInt8Groups) {
    const Stretch stretch{blocks, group, std::min(kInt8Groups, a.filled_groups - group)};
    unpack_int8(stretch, scratch);
    for (std::int64_t row = 0; row < count; row += kTileInt8) {
      with_count<kTileInt8>(std::min<std::int64_t>(kTileInt8, count - row), [&]<int COUNT>() {
        for (int strip = 0; strip < kStrips; ++strip) {
          tile_int8<COUNT>(stretch, scratch + strip * stretch.groups * kGroup * kStripRows, strip,
                           a, first + row, out + row * q4nx::kBlockRows + strip * kStripRows);
        }
      });
    }
  }
}

inline void matmul_bf16(const std::uint8_t* blocks, std::int64_t /*k*/, const RoundedActivations& a,
                        std::int64_t first, std::int64_t count, std::byte* scratch, float* out) {
  if (count <= kFusedRows) {
    return with_count<kFusedRows>(count,
                                  [&]<int COUNT>() { fused_bf16<COUNT>(blocks, a, first, out); });
  }
  auto* unpacked = reinterpret_cast<float*>(scratch);
  for (std::int64_t group = 0; group < a.filled_groups; group += kBFloat16Groups) {
    const Stretch stretch{blocks, group, std::min(kBFloat16Groups, a.filled_groups - group)};
    const std::int64_t columns = stretch.groups * kGroup;
    unpack_float(stretch, unpacked);
    for (std::int64_t row = 0; row < count; row += kTileBFloat16) {
      with_count<kTileBFloat16>(
          std::min<std::int64_t>(kTileBFloat16, count - row), [&]<int COUNT>() {
            alignas(32) float x[COUNT * kBFloat16Groups * kGroup];
            widen(a, first + row, COUNT, group * kGroup, columns, x);
            for (int strip = 0; strip < kStrips; ++strip) {
              tile_float<COUNT>(stretch, unpacked + strip * columns * kStripRows, strip, a,
                                first + row, x, out + row * q4nx::kBlockRows + strip * kStripRows);
            }
          });
    }
  }
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
