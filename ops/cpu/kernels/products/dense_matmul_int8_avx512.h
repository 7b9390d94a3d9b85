// SPDX-License-Identifier: Apache-2.0
// DenseMatMul of int8 activations in AVX-512: weights that are no integers are rounded to 8 bits.
//
// 32 columns of the weight x 256 of k (a part) get one scale and one minimum a column: w = minimum
// + scale * u with u in 0 .. 255 and scale = (range of the 256 weights) / 255; a weight that is
// int8 is its code less 128, exactly. Activations have one scale for each 256 of k too, so that a
// part is one sum of integers. Packed: for each part codes [k / 4][even columns, odd columns][16
// lanes of 4], then for each part scales and minima f32 [even columns, odd columns][16].
//
// Dataflow, for each stretch of parts that fills an L1 cache, and each tile of kTile rows of
// activations: a part's dots in int32, in registers, times both scales, plus minimum times the
// activations' sum, into `out`.
#pragma once

#include <algorithm>

#include "ops/cpu/kernels/products/dense_matmul_float.h"
#include "ops/cpu/kernels/products/q4nx_avx512.h"
#include "ops/cpu/kernels/with_count.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

static_assert(kDenseColumns == q4nx::kBlockRows);

// Rows of activations in registers: 6 x 2 dots hide a latency of 4 cycles at 2 dots a cycle, and
// leave the compiler room; 8 measured 2 % slower, 12 half as fast (GCC 12 spills).
constexpr int kTile = 6;

constexpr std::int64_t kBytePartBytes = kDenseColumns * kPartColumns;
// Parts that are multiplied together: 32 KB of codes, a Zen 4 core's L1.
constexpr std::int64_t kByteParts = 4;

// Parts of 8-bit codes of 32 columns x 256 of k, with scale and minimum of each.
struct ByteStretch {
  const std::byte* codes;
  const Parameters* parameters;
  std::int64_t first_part;
  std::int64_t parts;
  // Groups with weights: 8 a part but for the last part of a K that fills none.
  std::int64_t groups;
};

// The range of 32 columns, as scale and minimum of 8-bit codes; and 1 / scale, 0 where all weights
// of a column are equal. An infinite weight makes the scale infinite, and so NaN of what it is
// multiplied with.
struct ByteRange {
  Parameters parameters;
  Rows inverse;
};

inline ByteRange range_of(const Rows& lowest, const Rows& highest) {
  const auto inverse = [](__m512 range) {
    const __mmask16 some = _mm512_cmp_ps_mask(range, _mm512_setzero_ps(), _CMP_GT_OQ);
    return _mm512_maskz_div_ps(some, _mm512_set1_ps(255.0F), range);
  };
  const __m512 step = _mm512_set1_ps(1.0F / 255.0F);
  const Rows range{_mm512_sub_ps(highest.even, lowest.even),
                   _mm512_sub_ps(highest.odd, lowest.odd)};
  return {{{_mm512_mul_ps(range.even, step), _mm512_mul_ps(range.odd, step)}, lowest},
          {inverse(range.even), inverse(range.odd)}};
}

// Minimum and maximum lose NaN. So lanes are counted in which neither the even nor the odd row has
// met one: all, nearly always, which is one instruction for two vectors.
constexpr __mmask16 kAllLanes = 0xffff;
inline __mmask16 without_nan(__mmask16 lanes, const Rows& rows) {
  return _mm512_mask_cmp_ps_mask(lanes, rows.even, rows.odd, _CMP_ORD_Q);
}

// Makes the scales of those of 32 columns NaN of which one of rows(0) .. rows(count - 1) is.
template <typename RowsAt>
[[gnu::cold, gnu::noinline]] void mark_nan(std::int64_t count, const RowsAt& rows,
                                           ByteRange& range) {
  const __m512 zero = _mm512_setzero_ps();
  Rows& scale = range.parameters.scale;
  for (std::int64_t i = 0; i < count; ++i) {
    const Rows some = rows(i);
    scale.even = _mm512_fmadd_ps(some.even, zero, scale.even);
    scale.odd = _mm512_fmadd_ps(some.odd, zero, scale.odd);
  }
}

inline std::int64_t int8_block_bytes(std::int64_t k) {
  return q4nx::ceil_div(k, kPartColumns) *
         (kBytePartBytes + static_cast<std::int64_t>(sizeof(Parameters)));
}

// The range of `count` rows of 32 columns; of int8 weights that of their type, so that codes are
// what they were.
inline ByteRange dense_range(const DenseWeight& weight, const float* columns, std::int64_t count) {
  if (weight.type == DataType::kInt8) {
    return range_of({_mm512_set1_ps(-128.0F), _mm512_set1_ps(-128.0F)},
                    {_mm512_set1_ps(127.0F), _mm512_set1_ps(127.0F)});
  }
  Rows lowest = load_rows(columns);
  Rows highest = lowest;
  __mmask16 lanes = without_nan(kAllLanes, lowest);
  for (std::int64_t i = 1; i < count; ++i) {
    const Rows row = load_rows(columns + i * kDenseColumns);
    lanes = without_nan(lanes, row);
    lowest = {_mm512_min_ps(lowest.even, row.even), _mm512_min_ps(lowest.odd, row.odd)};
    highest = {_mm512_max_ps(highest.even, row.even), _mm512_max_ps(highest.odd, row.odd)};
  }
  ByteRange range = range_of(lowest, highest);
  if (lanes != kAllLanes) {
    mark_nan(count, [&](std::int64_t i) { return load_rows(columns + i * kDenseColumns); }, range);
  }
  return range;
}

// Four rows of 16 columns as codes, one row in each byte of a lane. What lies outside of the range
// is padding, which no activation meets.
inline __m512i code_quad(const __m512 (&rows)[4], __m512 lowest, __m512 inverse) {
  __m512i codes = _mm512_setzero_si512();
  for (int i = 3; i >= 0; --i) {
    const __m512i code = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_sub_ps(rows[i], lowest), inverse));
    const __m512i byte = _mm512_and_si512(code, _mm512_set1_epi32(0xff));
    codes = _mm512_or_si512(_mm512_slli_epi32(codes, 8), byte);
  }
  return codes;
}

inline void pack_int8(const DenseWeight& weight, std::int64_t block, std::byte* packed) {
  alignas(64) float columns[kPartColumns * kDenseColumns];
  const std::int64_t k_blocks = q4nx::ceil_div(weight.k, kPartColumns);
  auto* parameters = reinterpret_cast<Parameters*>(packed + k_blocks * kBytePartBytes);
  for (std::int64_t b = 0; b < k_blocks; ++b) {
    const std::int64_t k = b * kPartColumns;
    const std::int64_t count = std::min(kPartColumns, weight.k - k);
    widen_columns(weight, k, count, block, columns);
    std::fill(columns + count * kDenseColumns, std::end(columns), 0.0F);
    const ByteRange range = dense_range(weight, columns, count);
    std::byte* codes = packed + b * kBytePartBytes;
    for (std::int64_t i = 0; i < count; i += 4, codes += 128) {
      __m512 even[4];
      __m512 odd[4];
      for (int j = 0; j < 4; ++j) {
        const Rows row = load_rows(columns + (i + j) * kDenseColumns);
        even[j] = row.even;
        odd[j] = row.odd;
      }
      const Rows& lowest = range.parameters.minimum;
      _mm512_store_si512(codes, code_quad(even, lowest.even, range.inverse.even));
      _mm512_store_si512(codes + 64, code_quad(odd, lowest.odd, range.inverse.odd));
    }
    // The rest of the last group, which activations of zero meet.
    std::fill(codes, packed + b * kBytePartBytes + q4nx::ceil_div(count, q4nx::kGroup) * 1024,
              std::byte{0});
    alignas(64) float scales[2 * kDenseColumns];
    store_rows(range.parameters.scale, scales);
    store_rows(range.parameters.minimum, scales + kDenseColumns);
    scale_columns(weight, 2, block, scales);
    parameters[b] = {load_rows(scales), load_rows(scales + kDenseColumns)};
  }
}

// Fetches what is multiplied next, a stretch of blocks, while another one is multiplied, a part
// with each of `steps` tiles: all at once would be more than the core can ask for. Into L2, because
// L1 is full.
class StretchFetch {
 public:
  StretchFetch(const void* stretch, std::int64_t bytes, std::int64_t steps)
      : next_(static_cast<const char*>(stretch)), end_(next_ + bytes) {
    step_ = q4nx::ceil_div(bytes / kLine, steps) * kLine;
  }

  // Always inline: GCC takes a function that only fetches for one without effect.
  [[gnu::always_inline]] void step() {
    const char* until = std::min(next_ + step_, end_);
    for (; next_ < until; next_ += kLine) _mm_prefetch(next_, _MM_HINT_T1);
  }

 private:
  static constexpr std::int64_t kLine = 64;
  const char* next_;
  const char* end_;
  std::int64_t step_;
};

// The dots of COUNT rows of activations with a part: at most 256 x 255 x 127, far from 2^31.
template <int COUNT>
inline void dot_part(const std::byte* codes, std::int64_t groups, const std::int8_t* x,
                     std::int64_t x_stride, IntegerRows (&dot)[COUNT]) {
  for (std::int64_t g = 0; g < groups; ++g) {
    for (int quad = 0; quad < q4nx::kGroup / 4; ++quad, codes += 128, x += 4) {
      const __m512i even = _mm512_load_si512(codes);
      const __m512i odd = _mm512_load_si512(codes + 64);
      for (int r = 0; r < COUNT; ++r) {
        dot_int8(dot[r], even, odd, broadcast_activations(x + r * x_stride));
      }
    }
  }
}

template <int COUNT>
void tile_int8(const ByteStretch& stretch, const RoundedActivations& a, std::int64_t row,
               float* out) {
  const std::int64_t parts = a.groups / kGroupsPerPart;
  for (std::int64_t p = 0; p < stretch.parts; ++p) {
    const std::int64_t part = stretch.first_part + p;
    IntegerRows dot[COUNT];
    dot_part<COUNT>(
        stretch.codes + p * kBytePartBytes,
        std::min(kGroupsPerPart, stretch.groups - p * kGroupsPerPart),
        static_cast<const std::int8_t*>(a.values) + row * a.padded_k + part * kPartColumns,
        a.padded_k, dot);
    const Parameters& parameters = stretch.parameters[p];
    for (int r = 0; r < COUNT; ++r) {
      const __m512 scale = _mm512_set1_ps(a.scales[(row + r) * parts + part]);
      const __m512 sum = _mm512_set1_ps(a.sums[(row + r) * parts + part]);
      const __m512 even = _mm512_mul_ps(_mm512_cvtepi32_ps(dot[r].even), scale);
      const __m512 odd = _mm512_mul_ps(_mm512_cvtepi32_ps(dot[r].odd), scale);
      float* y = out + r * q4nx::kBlockRows;
      Rows result;
      if (part > 0) result = {_mm512_loadu_ps(y), _mm512_loadu_ps(y + 16)};
      result.even = _mm512_fmadd_ps(even, parameters.scale.even, result.even);
      result.odd = _mm512_fmadd_ps(odd, parameters.scale.odd, result.odd);
      result.even = _mm512_fmadd_ps(parameters.minimum.even, sum, result.even);
      result.odd = _mm512_fmadd_ps(parameters.minimum.odd, sum, result.odd);
      if (part + 1 < parts) {  // In the order of the registers until they are complete.
        _mm512_storeu_ps(y, result.even);
        _mm512_storeu_ps(y + 16, result.odd);
      } else {
        store_rows(result, y);
      }
    }
  }
}

inline void dense_int8(const std::byte* packed, const RoundedActivations& a, std::int64_t first,
                       std::int64_t count, float* out) {
  const std::int64_t k_blocks = a.groups / kGroupsPerPart;
  const auto* parameters = reinterpret_cast<const Parameters*>(packed + k_blocks * kBytePartBytes);
  for (std::int64_t b = 0; b < k_blocks; b += kByteParts) {
    const std::int64_t blocks = std::min(kByteParts, k_blocks - b);
    const std::int64_t groups =
        std::min(blocks * kGroupsPerPart, a.filled_groups - b * kGroupsPerPart);
    const ByteStretch stretch{packed + b * kBytePartBytes, parameters + b, b, blocks, groups};
    // What follows in memory: codes of more of k, or of the next columns.
    StretchFetch fetch(stretch.codes + blocks * kBytePartBytes, kByteParts * kBytePartBytes,
                       q4nx::ceil_div(count, kTile));
    for (std::int64_t row = 0; row < count; row += kTile) {
      fetch.step();
      with_count<kTile>(std::min<std::int64_t>(kTile, count - row), [&]<int COUNT>() {
        tile_int8<COUNT>(stretch, a, first + row, out + row * kDenseColumns);
      });
    }
  }
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
