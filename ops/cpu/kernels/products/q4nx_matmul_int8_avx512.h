// SPDX-License-Identifier: Apache-2.0
// Q4NXMatMul of int8 activations in AVX-512: weights are rounded to 8 bits once for many rows.
//
// Scales and minima of each 32 columns cost four instructions for every eight products: a third of
// the time. So 32 rows x 256 columns get one scale and one minimum a row, the 4-bit weights rounded
// to w = minimum + scale * u, u in 0 .. 255. With scale = (range of the row's 256 weights) / 255,
// against a range of 32 weights / 15 for the 4-bit codes, that adds (15 / 255)^2 = 0.35 % to the
// variance of the error of 4 bits, times the square of how much wider the range of 256 weights is
// (docs/performance.md has what was measured).
//
// Activations have one scale for each 256 columns too, so that a part is one sum of integers.
// (With a scale for each 32, prompts of a 1B model were read some 5 % slower.)
//
// Dataflow, for each range of columns whose 8-bit codes fill the scratch: round 32 rows, then for
// each tile of kTile rows of activations and each part of columns: its dots in int32, in
// registers, times both scales, plus minimum times the activations' sum, into `out`. Scratch: codes
// [column / 4][even rows, odd rows][16 lanes of 4 columns], then for each part scales and minima
// f32 [even rows, odd rows][16].
#pragma once

#include <algorithm>

#include "ops/cpu/kernels.h"
#include "ops/cpu/kernels/products/q4nx_avx512.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// Rows of activations in registers: 6 x 2 dots hide a latency of 4 cycles at 2 dots a cycle, and
// leave the compiler room; 8 measured 2 % slower, 12 half as fast (GCC 12 spills).
constexpr int kTile = 6;

constexpr std::int64_t kBytePartBytes = q4nx::kBlockRows * kPartColumns;
constexpr std::int64_t kByteParts = kMatMulScratchBytes / (kBytePartBytes + 4 * 64);

// Parts of 8-bit codes of 32 rows x some columns (256 of Q4NX), with scale and minimum of each.
struct BytePartRange {
  const std::byte* codes;
  const Parameters* parameters;
  std::int64_t first_part;
  std::int64_t parts;
  // Groups with weights: all of each part, fewer in the last part of a K that does not fill it.
  std::int64_t groups;
};

// Codes of a group of 32 columns as u = (factor * code + offset) / 256 in 16-bit lanes.
struct CodeMap {
  __m512i factor;
  __m512i offset;
};

// A 32-bit lane's low half in both of its halves.
inline __m512i twice(__m512i low) {
  const __m512i index = _mm512_set1_epi32(0x01000100);
  const __m512i base = _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0x00000000);
  return _mm512_shuffle_epi8(low, _mm512_add_epi8(index, base));
}

// The map from a group's 4-bit codes to weights above the part's minimum, in steps of 1/256 of an
// 8-bit code's step. A half step is added so that dropping the fraction rounds to nearest.
inline CodeMap code_map(__m512 scale, __m512 minimum, __m512 lowest, __m512 inverse) {
  constexpr int kHalf = 128;
  const __m512i factor = _mm512_cvtps_epi32(_mm512_mul_ps(scale, inverse));
  const __m512i offset = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_sub_ps(minimum, lowest), inverse));
  return {twice(factor), twice(_mm512_add_epi32(offset, _mm512_set1_epi32(kHalf)))};
}

// The high bytes of 16-bit integers: those of `low` moved down, those of `high` where they are
// (a | (b & c)).
inline __m512i high_bytes(__m512i low, __m512i high) {
  constexpr int kOrAnd = 0xf8;
  const __m512i upper = _mm512_set1_epi16(static_cast<std::int16_t>(0xff00));
  return _mm512_ternarylogic_epi32(_mm512_srli_epi16(low, 8), high, upper, kOrAnd);
}

// The 4-bit codes of four columns, one in each byte of a lane, SHIFT bits up, to 8 bits. Factor
// times code plus offset stays below 2^16: 255 steps of 256, a half step, and what rounding the
// factor (15 / 2) and the offset (1 / 2) may add, are 65416.
template <int SHIFT>
inline __m512i byte_codes(__m512i bytes, const CodeMap& map) {
  const __m512i nibble = _mm512_set1_epi16(0x0f);
  const __m512i even = _mm512_and_si512(_mm512_srli_epi16(bytes, SHIFT), nibble);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi16(bytes, SHIFT + 8), nibble);
  return high_bytes(_mm512_add_epi16(_mm512_mullo_epi16(even, map.factor), map.offset),
                    _mm512_add_epi16(_mm512_mullo_epi16(odd, map.factor), map.offset));
}

// The range of 32 rows, as scale and minimum of 8-bit codes; and 256 / scale, 0 where all weights
// of a row are equal. An infinite weight makes the scale infinite, and so the products with it NaN.
struct ByteRange {
  Parameters parameters;
  Rows inverse;
};

inline ByteRange range_of(const Rows& lowest, const Rows& highest) {
  const auto inverse = [](__m512 range) {
    const __mmask16 some = _mm512_cmp_ps_mask(range, _mm512_setzero_ps(), _CMP_GT_OQ);
    return _mm512_maskz_div_ps(some, _mm512_set1_ps(255.0F * 256.0F), range);
  };
  const __m512 step = _mm512_set1_ps(1.0F / 255.0F);
  const Rows range{_mm512_sub_ps(highest.even, lowest.even),
                   _mm512_sub_ps(highest.odd, lowest.odd)};
  return {{{_mm512_mul_ps(range.even, step), _mm512_mul_ps(range.odd, step)}, lowest},
          {inverse(range.even), inverse(range.odd)}};
}

// Minimum and maximum drop NaN. So a mask keeps the lanes without NaN in the even or odd row,
// nearly always all lanes, at one instruction for two vectors.
constexpr __mmask16 kAllLanes = 0xffff;
inline __mmask16 without_nan(__mmask16 lanes, const Rows& rows) {
  return _mm512_mask_cmp_ps_mask(lanes, rows.even, rows.odd, _CMP_ORD_Q);
}

// Makes a row's scale NaN if any of rows(0) .. rows(count - 1) has NaN for it.
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

// The range of a table's unsigned values.
struct CodeSpan {
  float lowest;
  float width;
};

inline CodeSpan span_of(__m128i table) {
  // The first byte of folded halves, quarters and so on; what is shifted in reaches other bytes.
  const auto folded = [&](const auto& fold) {
    __m128i all = fold(table, _mm_srli_si128(table, 8));
    all = fold(all, _mm_srli_si128(all, 4));
    all = fold(all, _mm_srli_si128(all, 2));
    return _mm_cvtsi128_si32(fold(all, _mm_srli_si128(all, 1))) & 0xff;
  };
  const int lowest = folded([](__m128i a, __m128i b) { return _mm_min_epu8(a, b); });
  const int highest = folded([](__m128i a, __m128i b) { return _mm_max_epu8(a, b); });
  return {static_cast<float>(lowest), static_cast<float>(highest - lowest)};
}

// The weights of a group's first and last code: the lowest and the highest, or in the other order,
// for some quantisers write negative scales.
struct Ends {
  Rows first;
  Rows last;
};

inline Ends ends_of(const Q4NXRows& weight, std::int64_t group) {
  const auto [scale, minimum] = load_parameters(weight, group);
  const auto at = [&](float code) -> Rows {
    const __m512 c = _mm512_set1_ps(code);
    return {_mm512_fmadd_ps(scale.even, c, minimum.even),
            _mm512_fmadd_ps(scale.odd, c, minimum.odd)};
  };
  if (!weight.layout.has_table) return {minimum, at(weight.layout.code_bits == 8 ? 255 : 15)};
  const CodeSpan span = span_of(load_table(weight, group));
  return {at(span.lowest), at(span.lowest + span.width)};
}

// The range of the 8-bit codes of each row: its lowest and highest weight in `groups` groups of
// columns.
inline ByteRange byte_range(const Q4NXRows& weight, std::int64_t first_group, std::int64_t groups) {
  Rows lowest = ends_of(weight, first_group).first;
  Rows highest = lowest;
  __mmask16 lanes = kAllLanes;
  for (std::int64_t group = first_group; group < first_group + groups; ++group) {
    const auto [first, last] = ends_of(weight, group);
    lanes = without_nan(lanes, last);
    lowest = {_mm512_min_ps(lowest.even, _mm512_min_ps(first.even, last.even)),
              _mm512_min_ps(lowest.odd, _mm512_min_ps(first.odd, last.odd))};
    highest = {_mm512_max_ps(highest.even, _mm512_max_ps(first.even, last.even)),
               _mm512_max_ps(highest.odd, _mm512_max_ps(first.odd, last.odd))};
  }
  ByteRange range = range_of(lowest, highest);
  if (lanes != kAllLanes) {
    mark_nan(groups, [&](std::int64_t i) { return ends_of(weight, first_group + i).last; }, range);
  }
  return range;
}

// The same for a group's stored 8-bit codes: u = (factor * code / 256 + offset) / 256. A negative
// scale counts codes downwards, which makes its factor positive. `scale` is 1/255 of the range of
// the group's weights, from `first` to `last`.
struct ByteMap {
  __m512i flip;
  __m512i factor;
  __m512i offset;
};

inline ByteMap byte_map(__m512 scale, __m512 first, __m512 last, __m512 lowest, __m512 inverse) {
  const __m512i negative = _mm512_srai_epi32(_mm512_castps_si512(scale), 31);
  const __m512 least = _mm512_min_ps(first, last);
  // 2^16 times a scale in steps; one that is a whole step would be 2^16 itself.
  const __m512 factor =
      _mm512_mul_ps(_mm512_mul_ps(_mm512_abs_ps(scale), inverse), _mm512_set1_ps(256));
  const __m512i most = _mm512_set1_epi32(0xffff);
  const __m512i offset = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_sub_ps(least, lowest), inverse));
  constexpr int kHalf = 128;
  return {_mm512_xor_si512(negative, _mm512_set1_epi8(static_cast<char>(0x80))),
          twice(_mm512_min_epi32(_mm512_cvtps_epi32(factor), most)),
          twice(_mm512_add_epi32(offset, _mm512_set1_epi32(kHalf)))};
}

// Stays below 2^16: 255 steps of 256, a half step, and what rounding the factor (255 / 512), the
// offset (1 / 2) and the range (2^-22 of it) may add.
inline __m512i mapped(__m512i codes, const ByteMap& map) {
  return _mm512_add_epi16(_mm512_mulhi_epu16(codes, map.factor), map.offset);
}

inline __m512i mapped_bytes(const std::uint8_t* stored, const ByteMap& map) {
  const __m512i upper = _mm512_set1_epi16(static_cast<std::int16_t>(0xff00));
  const __m512i bytes = _mm512_xor_si512(_mm512_loadu_si512(stored), map.flip);
  return high_bytes(mapped(_mm512_slli_epi16(bytes, 8), map),
                    mapped(_mm512_and_si512(bytes, upper), map));
}

// A table's values as codes of the whole range, 256 times 0 to 255, for _mm512_permutexvar_epi16.
constexpr int kLargestMapped = 255 * 256;
inline __m512i mapped_table(__m128i table, const CodeSpan& span) {
  const __m512 above =
      _mm512_sub_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(table)), _mm512_set1_ps(span.lowest));
  const float step = span.width > 0 ? static_cast<float>(kLargestMapped) / span.width : 0;
  const __m512i codes = _mm512_cvtps_epi32(_mm512_mul_ps(above, _mm512_set1_ps(step)));
  return _mm512_broadcast_i64x4(_mm512_cvtepi32_epi16(codes));
}

// The same for places in a table, of four columns as byte_codes() takes them.
template <int SHIFT>
inline __m512i mapped_places(__m512i bytes, __m512i table, const ByteMap& map) {
  const __m512i most = _mm512_set1_epi16(static_cast<std::int16_t>(kLargestMapped));
  // flip has the sign bits of lanes that count upwards.
  const __mmask32 downwards = ~_mm512_movepi16_mask(map.flip);
  const auto at = [&](__m512i places) {
    const __m512i codes = _mm512_permutexvar_epi16(places, table);
    return mapped(_mm512_mask_sub_epi16(codes, downwards, most, codes), map);
  };
  return high_bytes(at(_mm512_srli_epi16(bytes, SHIFT)), at(_mm512_srli_epi16(bytes, SHIFT + 8)));
}

// Calls function(codes of four columns, one in each byte of a lane) for a group.
template <typename Function>
void for_each_quad(const Q4NXRows& weight, std::int64_t group, const Function& function) {
  for (int eight = 0; eight < 4; ++eight) {
    const __m512i strip0 = _mm512_loadu_si512(weight.codes(group, 0) + eight * 64);
    const __m512i strip1 = _mm512_loadu_si512(weight.codes(group, 1) + eight * 64);
    for (const ColumnIndex& quad : kColumnQuads)
      function(_mm512_permutex2var_epi8(strip0, load_index(quad), strip1));
  }
}

// A group of 32 columns of 32 rows to 8-bit codes.
inline void round_group(const Q4NXRows& weight, std::int64_t group, const ByteRange& range,
                        std::byte* codes) {
  const auto [scale, minimum] = load_parameters(weight, group);
  const Rows& lowest = range.parameters.minimum;
  const auto byte_maps = [&](float width) -> std::pair<ByteMap, ByteMap> {
    const auto [first, last] = ends_of(weight, group);
    const __m512 factor = _mm512_set1_ps(width / 255);
    return {byte_map(_mm512_mul_ps(scale.even, factor), first.even, last.even, lowest.even,
                     range.inverse.even),
            byte_map(_mm512_mul_ps(scale.odd, factor), first.odd, last.odd, lowest.odd,
                     range.inverse.odd)};
  };
  if (weight.layout.code_bits == 8) {
    const auto [even, odd] = byte_maps(255);
    const std::uint8_t* stored = weight.codes(group, 0);
    for (std::int64_t at = 0; at < q4nx::kBlockRows * q4nx::kGroup; at += 128) {
      _mm512_store_si512(codes + at, mapped_bytes(stored + at, even));
      _mm512_store_si512(codes + at + 64, mapped_bytes(stored + at + 64, odd));
    }
  } else if (weight.layout.has_table) {
    const __m128i table = load_table(weight, group);
    const CodeSpan span = span_of(table);
    const __m512i values = mapped_table(table, span);
    const std::pair<ByteMap, ByteMap> maps = byte_maps(span.width);
    for_each_quad(weight, group, [&](__m512i bytes) {
      _mm512_store_si512(codes, mapped_places<0>(bytes, values, maps.first));
      _mm512_store_si512(codes + 64, mapped_places<4>(bytes, values, maps.second));
      codes += 128;
    });
  } else {
    const CodeMap even = code_map(scale.even, minimum.even, lowest.even, range.inverse.even);
    const CodeMap odd = code_map(scale.odd, minimum.odd, lowest.odd, range.inverse.odd);
    for_each_quad(weight, group, [&](__m512i bytes) {
      _mm512_store_si512(codes, byte_codes<0>(bytes, even));
      _mm512_store_si512(codes + 64, byte_codes<4>(bytes, odd));
      codes += 128;
    });
  }
}

// One part of 32 rows to 8-bit codes: `groups` groups of columns.
inline Parameters unpack_part(const Q4NXRows& weight, std::int64_t first_group, std::int64_t groups,
                              std::byte* codes) {
  const ByteRange range = byte_range(weight, first_group, groups);
  for (std::int64_t group = 0; group < groups; ++group)
    round_group(weight, first_group + group, range,
                codes + group * q4nx::kBlockRows * q4nx::kGroup);
  return range.parameters;
}

// The range of kByteParts parts (fewer at the end of the row) from `first_part` on.
inline BytePartRange unpack_int8(const Q4NXRows& weight, std::int64_t first_part,
                                 const RoundedActivations& a, std::byte* scratch) {
  const std::int64_t count = std::min(kByteParts, a.groups / kGroupsPerPart - first_part);
  const std::int64_t first_group = first_part * kGroupsPerPart;
  const std::int64_t groups = std::min(count * kGroupsPerPart, a.filled_groups - first_group);
  auto* parameters = reinterpret_cast<Parameters*>(scratch + kByteParts * kBytePartBytes);
  for (std::int64_t p = 0; p < count; ++p) {
    const std::int64_t before = p * kGroupsPerPart;
    parameters[p] =
        unpack_part(weight, first_group + before, std::min(kGroupsPerPart, groups - before),
                    scratch + p * kBytePartBytes);
  }
  return {scratch, parameters, first_part, count, groups};
}

// Fetches the next range of blocks during the product of another one, a part in each of `steps`
// steps. A core cannot have requests for the whole range at once. (With 33 rows, fetching 24 lines
// at each tile took 12 % longer on a Granite Rapids than 6 at each of its parts of columns.)
// Fetches into L2, because L1 is full.
class RangeFetch {
 public:
  RangeFetch(const void* range, std::int64_t bytes, std::int64_t steps)
      : next_(static_cast<const char*>(range)), end_(next_ + bytes) {
    step_ = q4nx::ceil_div(bytes / kLine, steps) * kLine;
  }

  // Always inline: GCC removes calls of a function that only prefetches.
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

// The conversion of dots with a part to results, for rows of activations from `row` on.
struct PartResults {
  Rows scale;
  Rows minimum;
  const float* scales;
  const float* sums;
  std::int64_t parts;
  bool first;
  bool last;

  PartResults(const Parameters& parameters, const RoundedActivations& a, std::int64_t row,
              std::int64_t part)
      : scale(parameters.scale),
        minimum(parameters.minimum),
        parts(a.padded_k / a.part_columns),
        first(part == 0),
        last(part + 1 == parts) {
    scales = a.scales + row * parts + part;
    sums = a.sums + row * parts + part;
  }

  // Adds to out[32] the dots of the r-th row, times both scales, and the minima times the
  // activations' sum. Until they are complete, results are in the order of the registers.
  void add(const IntegerRows& dot, std::int64_t r, float* out) const {
    const __m512 row_scale = _mm512_set1_ps(scales[r * parts]);
    const __m512 sum = _mm512_set1_ps(sums[r * parts]);
    const __m512 even = _mm512_mul_ps(_mm512_cvtepi32_ps(dot.even), row_scale);
    const __m512 odd = _mm512_mul_ps(_mm512_cvtepi32_ps(dot.odd), row_scale);
    Rows result;
    if (!first) result = {_mm512_loadu_ps(out), _mm512_loadu_ps(out + 16)};
    result.even = _mm512_fmadd_ps(even, scale.even, result.even);
    result.odd = _mm512_fmadd_ps(odd, scale.odd, result.odd);
    result.even = _mm512_fmadd_ps(minimum.even, sum, result.even);
    result.odd = _mm512_fmadd_ps(minimum.odd, sum, result.odd);
    if (last) return store_rows(result, out);
    _mm512_storeu_ps(out, result.even);
    _mm512_storeu_ps(out + 16, result.odd);
  }
};

template <int COUNT>
void tile_int8(const BytePartRange& range, const RoundedActivations& a, std::int64_t row,
               RangeFetch& fetch, float* out) {
  const std::int64_t part_groups = a.part_columns / q4nx::kGroup;
  for (std::int64_t p = 0; p < range.parts; ++p) {
    fetch.step();
    const std::int64_t part = range.first_part + p;
    IntegerRows dot[COUNT];
    const auto* x =
        static_cast<const std::int8_t*>(a.values) + row * a.padded_k + part * a.part_columns;
    dot_part<COUNT>(range.codes + p * a.part_columns * q4nx::kBlockRows,
                    std::min(part_groups, range.groups - p * part_groups), x, a.padded_k, dot);
    const PartResults results(range.parameters[p], a, row, part);
    for (int r = 0; r < COUNT; ++r) results.add(dot[r], r, out + r * q4nx::kBlockRows);
  }
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
