// SPDX-License-Identifier: Apache-2.0
// FlowQKV (Gemma3 paper, section 3.1.3, eq. 6-11) by matrix units, for many rows: the dataflow of
// flow_qkv_attention.h, whose softmax, masks and state these are, with both products as tiles of
// bf16 that are summed in f32.
//
// Dataflow, for each chunk of keys: K is copied as rows of whole tiles, and V is transposed to
// tiles of 16 elements of the head x 16 pairs of keys, once for all blocks of rows. For each block:
// S^T = K Q^T, 32 keys x 2 vectors of rows at once (eq. 6); softmax (eq. 7-10), which leaves F in
// the order in which a tile takes it; and Y^T = V^T F^T, 32 elements of the head x 2 vectors of
// rows at once (eq. 11). A core does not load from memory what it has just stored from a tile
// before the caches have it: so such a product is added to the numerators while the next one is
// made.
//
// A row's sum over a chunk begins at 0 and takes 32 keys at once, counted from the chunk's start:
// so its bits do not depend on the keys that other rows of the block see.
//
// The template argument Pairs is an Arithmetic of pairs of bf16 (avx512.h), Unit is the matrix
// unit: an object configures tiles of 16 rows as long as it lives, of 64 bytes (kX0, kX1) or of
// kLanes times 4 bytes (the others). Caller: attention.h.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>

#include "ops/cpu/kernels/amx/tiles.h"
#include "ops/cpu/kernels/attention/flow_qkv_attention.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// Keys, and elements of a head, that are multiplied together: two tiles.
constexpr int kTwoTiles = 2 * kTileRows;
// Pairs in a row of a tile.
constexpr std::int64_t kTilePairs = kTileBytes / 4;

template <typename Pairs>
struct TileArithmetic : Pairs {
  using Element = typename Pairs::Element;
  static constexpr int tile(int /*vectors*/) { return kTwoTiles; }
  static bool converts_keys(DataType /*cache_type*/) { return true; }

  static void convert_key(const AttentionSweep& sweep, std::int64_t key, Element* out) {
    if (Pairs::converts_keys(sweep.cache_type)) {
      Pairs::convert_key(sweep, key, out);
    } else {
      std::memcpy(out, cache_row(sweep, sweep.key, key),
                  static_cast<std::size_t>(sweep.head_size) * 2);
    }
  }
};

template <typename Pairs, typename Unit, int VECTORS>
class TileRows : ManyRows<TileArithmetic<Pairs>, VECTORS> {
  using A = TileArithmetic<Pairs>;
  using Base = ManyRows<A, VECTORS>;
  using Element = typename A::Element;
  using Range = typename Base::Range;
  using Base::blocks_;
  using Base::keys_;
  using Base::padded_head_;
  using Base::scores_;
  using Base::sweep_;
  using Base::values_;
  // A row of scores, of F and of numerators: f32, or pairs of bf16.
  static constexpr std::int64_t kRow = static_cast<std::int64_t>(VECTORS) * kLanes;
  static constexpr std::int64_t kRowBytes = kRow * 4;
  // Two tiles times two vectors of rows.
  static constexpr std::int64_t kProduct = static_cast<std::int64_t>(kTwoTiles) * 2 * kLanes;
  static constexpr std::int64_t kTileElements = kTileRows * kTilePairs;
  static constexpr float kNothing = -std::numeric_limits<float>::infinity();
  // A row of pairs of values, no power of two, so that rows lie in different sets of a cache.
  static constexpr std::int64_t kPairsRow = kMaxHeadSize + kTwoTiles;

 public:
  explicit TileRows(const AttentionSweep& sweep) : Base(sweep) {}
  using Base::scratch;

  void run() {
    const Unit configured;
    for (std::int64_t block = 0; block < blocks_.blocks(); ++block) blocks_.begin(block);
    for (std::int64_t start = sweep_.begin; start < sweep_.keys; start += sweep_.chunk_keys) {
      const std::int64_t end = std::min(start + sweep_.chunk_keys, sweep_.keys);
      order_chunk(start, end);
      for (std::int64_t block = 0; block < blocks_.blocks(); ++block) attend(block, start, end);
    }
    for (std::int64_t block = 0; block < blocks_.blocks(); ++block) blocks_.finish(block);
  }

 private:
  std::int64_t head_pairs() const { return padded_head_ / 2; }

  // K as [keys][padded head], V as [head / 16][keys / 32][16 elements][16 pairs]; zeros past the
  // last key and element.
  void order_chunk(std::int64_t start, std::int64_t end) {
    const std::int64_t groups = round_up(end - start, kTwoTiles) / kTwoTiles;
    std::fill_n(keys_, groups * kTwoTiles * head_pairs(), Element{});
    for (std::int64_t key = start; key < end; ++key)
      A::convert_key(sweep_, key, keys_ + (key - start) * head_pairs());
    alignas(64) Element pairs[kTilePairs][kPairsRow];
    for (Element* row : pairs) std::fill_n(row, padded_head_, Element{});
    for (std::int64_t group = 0; group < groups; ++group) {
      for (std::int64_t p = 0; p < kTilePairs; ++p) {
        const std::int64_t key = start + group * kTwoTiles + 2 * p;
        if (key < end) {
          A::order_values(sweep_, key, end, pairs[p]);
        } else {
          std::fill_n(pairs[p], padded_head_, Element{});
        }
      }
      for (std::int64_t i = 0; i < padded_head_; i += kTileRows)
        transpose_tile(&pairs[0][i], values_ + (i / kTileRows * groups + group) * kTileElements);
    }
  }

  static void transpose_tile(const Element* pairs, Element* to) {
    for (std::int64_t p = 0; p < kTilePairs; p += kLanes) {
      for (std::int64_t e = 0; e < kTileRows; e += kLanes) {
        Vector square[kLanes];
        for (int r = 0; r < kLanes; ++r)
          std::memcpy(&square[r], pairs + (p + r) * kPairsRow + e, sizeof(Vector));
        transpose(square);
        for (int r = 0; r < kLanes; ++r)
          std::memcpy(to + (e + r) * kTilePairs + p, &square[r], sizeof(Vector));
      }
    }
  }

  void attend(std::int64_t block, std::int64_t start, std::int64_t end) {
    Range range = this->range_of(block, start, end);
    if (range.begin >= range.end) return;
    range.begin = start + (range.begin - start) / kTwoTiles * kTwoTiles;
    const std::int64_t first = (range.begin - start) / kTwoTiles;
    const std::int64_t groups = round_up(range.end - range.begin, kTwoTiles) / kTwoTiles;
    for (std::int64_t group = 0; group < groups; ++group) {
      score(blocks_.query(block), keys_ + (first + group) * kTwoTiles * head_pairs(),
            scores_ + group * kTwoTiles * kRow);
    }
    if (sweep_.softcap > 0 || sweep_.bias != nullptr) this->adjust(block, range);
    this->mask(block, range);
    // Keys past the last one.
    const std::int64_t keys = range.end - range.begin;
    std::fill_n(scores_ + keys * kRow, (groups * kTwoTiles - keys) * kRow, kNothing);
    range.end = range.begin + groups * kTwoTiles;
    alignas(64) float correction[kRow];
    this->softmax(block, range, correction);
    const std::int64_t chunk_groups = round_up(end - start, kTwoTiles) / kTwoTiles;
    add_values(values_ + first * kTileElements, chunk_groups, groups, correction,
               blocks_.numerator(block));
  }

  // Products of two tiles that follow each other `x_next` elements apart with one or two vectors of
  // rows, summed over `steps` tiles.
  template <int WIDE>
  [[gnu::noinline]] static void multiply(const Element* x, std::int64_t x_row, std::int64_t x_next,
                                         std::int64_t x_step, const Element* rows,
                                         std::int64_t steps, float* out, std::int64_t out_row) {
    Unit::template clear<kEven0>();
    Unit::template clear<kEven1>();
    if constexpr (WIDE == 2) {
      Unit::template clear<kOdd0>();
      Unit::template clear<kOdd1>();
    }
    for (std::int64_t step = 0; step < steps; ++step) {
      Unit::template load<kX0>(x, x_row * 4);
      Unit::template load<kEven>(rows, kRowBytes);
      Unit::template dot<kEven0, kX0, kEven>();
      Unit::template load<kX1>(x + x_next, x_row * 4);
      Unit::template dot<kEven1, kX1, kEven>();
      if constexpr (WIDE == 2) {
        Unit::template load<kOdd>(rows + kLanes, kRowBytes);
        Unit::template dot<kOdd0, kX0, kOdd>();
        Unit::template dot<kOdd1, kX1, kOdd>();
      }
      x += x_step;
      rows += kTilePairs * kRow;
    }
    Unit::template store<kEven0>(out, out_row * 4);
    Unit::template store<kEven1>(out + kTileRows * out_row, out_row * 4);
    if constexpr (WIDE == 2) {
      Unit::template store<kOdd0>(out + kLanes, out_row * 4);
      Unit::template store<kOdd1>(out + kTileRows * out_row + kLanes, out_row * 4);
    }
  }

  // Calls function.template operator()<WIDE>(v) for vectors of rows v and, if WIDE is 2, v + 1.
  template <typename Function>
  static void for_vectors(const Function& function) {
    for (int v = 0; v + 1 < VECTORS; v += 2) function.template operator()<2>(v);
    if constexpr (VECTORS % 2 == 1) function.template operator()<1>(VECTORS - 1);
  }

  // S^T of two tiles of keys.
  void score(const Element* query, const Element* keys, float* scores) const {
    for_vectors([&]<int WIDE>(int v) {
      multiply<WIDE>(keys, head_pairs(), kTileRows * head_pairs(), kTilePairs, query + v * kLanes,
                     head_pairs() / kTilePairs, scores + v * kLanes, kRow);
    });
  }

  // Eq. 11. `values` are the first of `groups` groups of keys, of `chunk_groups` in the chunk.
  void add_values(const Element* values, std::int64_t chunk_groups, std::int64_t groups,
                  const float* correction, float* numerator) {
    const auto* factors = reinterpret_cast<const Element*>(scores_);
    int made = 0;
    // The sum's place, and how many vectors of rows it has.
    float* to = nullptr;
    const float* by = nullptr;
    int wide = 0;
    const auto add = [&](const float* product) {
      for (std::int64_t i = 0; i < kTwoTiles; ++i) {
        for (int v = 0; v < wide; ++v) {
          float* out = to + i * kRow + v * kLanes;
          store(out, load(product + (2 * i + v) * kLanes) + load(by + v * kLanes) * load(out));
        }
      }
    };
    for (std::int64_t i = 0; i < padded_head_; i += kTwoTiles) {
      const Element* x = values + i / kTileRows * chunk_groups * kTileElements;
      for_vectors([&]<int WIDE>(int v) {
        multiply<WIDE>(x, kTilePairs, chunk_groups * kTileElements, kTileElements,
                       factors + v * kLanes, groups, products_[made % 2], 2 * kLanes);
        add(products_[(made + 1) % 2]);
        to = numerator + i * kRow + v * kLanes;
        by = correction + v * kLanes;
        wide = WIDE;
        ++made;
      });
    }
    add(products_[(made + 1) % 2]);
  }

  alignas(64) float products_[2][kProduct];
};

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
