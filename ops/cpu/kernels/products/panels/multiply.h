// SPDX-License-Identifier: Apache-2.0
// Q4NXMatMul of int8 activations in AVX-512, for more rows than FusedDQP takes: 4-bit codes are
// unpacked once for all rows, and their dots scaled as integers.
//
// Each group of 32 columns has scales of its own. Applying them to its dots in f32 takes half as
// many instructions as the dots themselves. So the weights of a row in a part of 256 columns get
// one step, a power of two, and the scales of its 8 groups become integers, multiples of it. A dot
// of 32 activations up to 127 with codes less 8 is at most 127 x 32 x 8 = 32512 and fits 16 bits:
// the dots of two groups are packed side by side, and one instruction multiplies both by their
// scales and adds them up.
//
// The step is 2^-12 of the power of two 2^e of the row's largest scale in the part, so that scales
// are below 2^13, and the sum of a part below 8 x 32512 x 2^13 < 2^31. A scale is a bf16, which has
// 8 significant bits: it is a multiple of the step, and nothing is rounded, unless it is below 2^-5
// of 2^e; then it is off by half a step at most. The codes less 8 leave `minimum + 8 scale` of a
// group's minimum, which is 0 in symmetric weights, and multiplies the group's sum in f32.
//
// Activations have one scale for each 256 columns, too, and lie in panels (Int8Panels).
//
// Dataflow, for each row of blocks and each part of 32 rows x 256 columns: scales (PartWeights),
// then for each tile of up to kPanelTile rows of activations and each strip of 16 rows: dots in
// registers, two groups at a time, scaled into totals in registers, and those times both scales
// into `out`. The first tile unpacks codes and scales as it goes, so that memory, unpacking and
// dots overlap, and keeps them in PartWeights (10 KB, for L1) for the others.
#pragma once

#include <algorithm>

#include "ops/cpu/kernels.h"
#include "ops/cpu/kernels/products/fetch_ahead.h"
#include "ops/cpu/kernels/products/panels/weights.h"
#include "ops/cpu/kernels/products/with_layout.h"
#include "ops/cpu/kernels/with_count.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// 8 x 2 dots, 8 totals, two registers of codes and one of activations are 27 of 32 registers.
constexpr int kPanelTile = 8;

// Rows of a part in panels, as an index. The four pointers are computed at each use: GCC 12 would
// otherwise keep them in vector registers, where they wait for dots.
class PanelRows {
 public:
  PanelRows(const Int8Panels& panels, std::int64_t part, std::int64_t row)
      : panels_(&panels), at_(part * panels.rows + row) {}

  const std::int8_t* values() const { return panels_->values + at_ * kPartColumns; }
  const std::int32_t* offsets() const { return panels_->offsets + at_ * kGroupsPerPart; }
  const float* scales() const { return panels_->scales + at_; }
  const float* sums() const { return panels_->sums + at_ * kGroupsPerPart; }

  PanelRows from(std::int64_t row) const {
    PanelRows rows = *this;
    rows.at_ += row;
    return rows;
  }

 private:
  const Int8Panels* panels_;
  std::int64_t at_;
};

// 8 bytes in every 64-bit lane.
inline __m512i broadcast_pair(const void* x) {
  std::int64_t eight;
  std::memcpy(&eight, x, sizeof(eight));
  return _mm512_set1_epi64(eight);
}

// Whether a part of a product is the first one, which begins `out`, or the last one, which orders
// it.
struct PartOrder {
  bool first;
  bool last;
};

// Adds to out[COUNT][32] the totals of COUNT rows of activations with a strip of a part, times both
// scales, and what the groups' minima leave.
template <int COUNT, q4nx::Layout LAYOUT>
inline void add_totals(const PartGroups& groups, const PartWeights& w, int strip, PanelRows rows,
                       PartOrder order, const __m512i (&total)[COUNT], float* out) {
  out += strip * q4nx::kStripRows;
  // Not unrolled, GCC 12 keeps the totals in memory.
#pragma GCC unroll 8
  for (int r = 0; r < COUNT; ++r, out += q4nx::kBlockRows) {
    // Multiplies the scales first: a sum of integers times the scale of large activations may
    // exceed f32.
    const __m512 scale = _mm512_mul_ps(_mm512_set1_ps(rows.scales()[r]), w.steps[strip]);
    __m512 sum = order.first ? _mm512_setzero_ps() : _mm512_loadu_ps(out);
    sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total[r]), scale, sum);
    if constexpr (LAYOUT.has_minima) {
      for (std::int64_t g = 0; g < 2 * groups.pairs(); ++g) {
        const __m512 group_sum = _mm512_set1_ps(rows.sums()[r * kGroupsPerPart + g]);
        sum = _mm512_fmadd_ps(w.minima[strip][g], group_sum, sum);
      }
    }
    _mm512_storeu_ps(out, order.last ? reorder(sum) : sum);
  }
}

// Whether a tile finds codes and scales packed or unpacked. The first tile unpacks them, and keeps
// them if more tiles follow.
enum class Codes : std::uint8_t { kPacked, kPackedToKeep, kKept };

// COUNT rows of activations times a strip of a part, added to out[COUNT][32]. `fetch` is for the
// first pair of groups; what later pairs fetch follows, kGroupBytes apart. If GCC 12 inlines it, it
// takes 2 % longer.
template <int COUNT, q4nx::Layout LAYOUT, Codes CODES>
[[gnu::noinline]] void tile_panels(const PartGroups& groups, PartWeights& w, int strip,
                                   PanelRows rows, PartOrder order, Fetch fetch, float* out) {
  __m512i total[COUNT];
#pragma GCC unroll 8
  for (int r = 0; r < COUNT; ++r) total[r] = _mm512_setzero_si512();
  for (std::int64_t pair = 0; pair < groups.pairs(); ++pair) {
    const PackedPair packed = groups.packed<LAYOUT>(pair, strip);
    Fetch lines = fetch.from(pair * kGroupBytes<LAYOUT>);
    if constexpr (CODES == Codes::kKept) lines.rest();
    __m512i even[COUNT];
    __m512i odd[COUNT];
    for (int r = 0; r < COUNT; ++r)
      even[r] = odd[r] = broadcast_pair(rows.offsets() + r * kGroupsPerPart + pair * 2);
    PairCodes next{};
    __m512i scales;
    if constexpr (CODES == Codes::kKept) {
      scales = w.scales[strip][pair];
    } else {
      next = packed.unpack(0);
      scales = pair_scales<LAYOUT>(groups, w, pair, strip);
      if constexpr (CODES == Codes::kPackedToKeep) w.scales[strip][pair] = scales;
    }
    // Not unrolled, GCC 12 moves all dots from register to register: half the speed.
#pragma GCC unroll 8
    for (int quad = 0; quad < kQuads; ++quad) {
      PairCodes codes;
      if constexpr (CODES == Codes::kKept) {
        codes = w.load(strip, pair, quad);
      } else {
        lines.step();
        // Unpacks before the dots of these codes, which would otherwise wait.
        codes = next;
        if (quad + 1 < kQuads) next = packed.unpack(quad + 1);
        if constexpr (CODES == Codes::kPackedToKeep) w.keep(strip, pair, quad, codes);
      }
      for (int r = 0; r < COUNT; ++r) {
        const __m512i x =
            broadcast_pair(rows.values() + r * kPartColumns + (pair * kQuads + quad) * 8);
        even[r] = _mm512_dpbusd_epi32(even[r], codes.even, x);
        odd[r] = _mm512_dpbusd_epi32(odd[r], codes.odd, x);
      }
    }
    if constexpr (CODES != Codes::kKept) lines.rest();
    for (int r = 0; r < COUNT; ++r)
      total[r] = _mm512_dpwssd_epi32(total[r], _mm512_packs_epi32(even[r], odd[r]), scales);
  }
  add_totals<COUNT, LAYOUT>(groups, w, strip, rows, order, total, out);
}

// Multiplies a part in the first row of blocks by all rows of activations. Tiles are nearly equal:
// a tile of one or two rows would wait for its own dots. Meanwhile `fetch`, of the first pair of
// groups, and what follows it is fetched, evenly.
template <q4nx::Layout LAYOUT>
void multiply_part(const PartGroups& groups, PartWeights& w, std::int64_t part,
                   const Int8Panels& panels, std::int64_t first, std::int64_t count,
                   PartOrder order, Fetch fetch, float* out) {
  begin_part<LAYOUT>(groups, w);
  const std::int64_t tiles = q4nx::ceil_div(count, kPanelTile);
  for (std::int64_t tile = 0; tile < tiles; ++tile) {
    const std::int64_t begin = count * tile / tiles;
    const std::int64_t end = count * (tile + 1) / tiles;
    const PanelRows rows(panels, part, first + begin);
    float* y = out + begin * q4nx::kBlockRows;
    with_count<kPanelTile>(end - begin, [&]<int COUNT>() {
      for (int strip = 0; strip < 2; ++strip) {
        const Fetch lines =
            fetch.from(strip * groups.pairs() * kGroupBytes<LAYOUT>).part(tile, tiles);
        const auto multiply = [&]<Codes CODES>() {
          tile_panels<COUNT, LAYOUT, CODES>(groups, w, strip, rows, order, lines, y);
        };
        if (tile > 0) {
          multiply.template operator()<Codes::kKept>();
        } else if (tiles > 1) {
          multiply.template operator()<Codes::kPackedToKeep>();
        } else {
          multiply.template operator()<Codes::kPacked>();
        }
      }
    });
  }
}

// Up to this many bytes of activations are read again for each row of blocks, and weights in the
// order of memory, because few rows wait for weights. More activations are multiplied by one part
// of 256 columns at a time, for all rows of blocks. A quarter of an L2 of 1 MB.
constexpr std::int64_t kRereadBytes = 256 << 10;

// Calls multiply(groups, part, order, fetch, out[count][32]) for each part of each row of blocks.
// `fetch` has the lines to fetch during the first pair of groups; those of later ones follow.
template <q4nx::Layout LAYOUT, typename Multiply>
void for_each_part(const Q4NXRows& weight, std::int64_t row_blocks, const RoundedActivations& a,
                   std::int64_t count, float* out, const Multiply& multiply) {
  const std::int64_t parts = q4nx::ceil_div(a.filled_groups, kGroupsPerPart);
  const bool in_order = count * a.padded_k <= kRereadBytes;
  // One object, changed a word at a time. A copy would load data that has just been stored in
  // smaller pieces, and wait for all stores under way.
  PartGroups groups{weight, 0, 0};
  for (std::int64_t step = 0; step < parts * row_blocks; ++step) {
    const std::int64_t part = in_order ? step % parts : step / row_blocks;
    const std::int64_t block = in_order ? step / parts : step % row_blocks;
    groups.weight.bytes = weight.bytes + block * weight.row_bytes;
    groups.first = part * kGroupsPerPart;
    groups.count = std::min(kGroupsPerPart, a.filled_groups - groups.first);
    // The lines of some parts later, or of the same part of the next row of blocks.
    const std::uint8_t* part_bytes = groups.weight.scales(groups.first);
    const Fetch fetch = in_order ? stream_ahead(part_bytes, kGroupBytes<LAYOUT>,
                                                2 * kGroupsPerPart * kGroupBytes<LAYOUT>)
                                 : Fetch(part_bytes + weight.row_bytes, kGroupBytes<LAYOUT>);
    multiply(groups, part, PartOrder{part == 0, part + 1 == parts}, fetch,
             out + block * count * q4nx::kBlockRows);
  }
}

template <q4nx::Layout LAYOUT>
void multiply_panels(const Q4NXRows& weight, std::int64_t row_blocks, const RoundedActivations& a,
                     std::int64_t first, std::int64_t count, std::byte* scratch, float* out) {
  auto& w = *reinterpret_cast<PartWeights*>(scratch);
  for_each_part<LAYOUT>(
      weight, row_blocks, a, count, out,
      [&](const PartGroups& groups, std::int64_t part, PartOrder order, Fetch fetch, float* y) {
        multiply_part<LAYOUT>(groups, w, part, a.panels, first, count, order, fetch, y);
      });
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
