// SPDX-License-Identifier: Apache-2.0
// Query rows in the lanes, for FlowQKV (flow_qkv_attention.h): blocks of rows, transposed once, and
// their state (m, l, Y), transposed back at the end.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "ops/cpu/kernels.h"
#include "ops/cpu/kernels/vector.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// Like cpu::Scratch, but compiled for this instruction set alone: hands out parts of `memory` or,
// if that is null, only counts.
class Parts {
 public:
  explicit Parts(std::byte* memory) : memory_(memory) {}
  template <typename T>
  T* take(std::int64_t count) {
    auto* part = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + used_);
    used_ += (count * static_cast<std::int64_t>(sizeof(T)) + 63) / 64 * 64;
    return part;
  }
  std::int64_t used() const { return used_; }

 private:
  std::byte* memory_;
  std::int64_t used_ = 0;
};

inline std::int64_t round_up(std::int64_t n, std::int64_t unit) {
  return (n + unit - 1) / unit * unit;
}

template <int DISTANCE, int... I>
inline void exchange(Vector& a, Vector& b, std::integer_sequence<int, I...> /*lanes*/) {
  const Vector left =
      __builtin_shufflevector(a, b, ((I & DISTANCE) == 0 ? I : kLanes + I - DISTANCE)...);
  b = __builtin_shufflevector(a, b, ((I & DISTANCE) == 0 ? I + DISTANCE : kLanes + I)...);
  a = left;
}

// Transposes kLanes x kLanes by exchanging off-diagonal quarters of ever larger squares.
template <int DISTANCE = 1>
inline void transpose(Vector (&rows)[kLanes]) {
  for (int i = 0; i < kLanes; ++i) {
    if ((i & DISTANCE) == 0) {
      exchange<DISTANCE>(rows[i], rows[i + DISTANCE], std::make_integer_sequence<int, kLanes>());
    }
  }
  if constexpr (2 * DISTANCE < kLanes) transpose<2 * DISTANCE>(rows);
}

// A block is VECTORS vectors of rows. Arithmetic: see float.h.
template <typename Arithmetic, int VECTORS>
class QueryBlocks {
  using A = Arithmetic;
  using Element = typename A::Element;

 public:
  static constexpr int kRows = VECTORS * kLanes;
  // Keys of a tile of scores, or elements of a tile of numerators: kTile x VECTORS sums fill the
  // registers.
  static constexpr int kTile = A::tile(VECTORS);
  static constexpr float kNothing = -std::numeric_limits<float>::infinity();

  QueryBlocks(const AttentionSweep& sweep, Parts& parts)
      : sweep_(sweep),
        blocks_((sweep.rows + kRows - 1) / kRows),
        head_steps_((sweep.head_size + A::kStep - 1) / A::kStep),
        padded_head_(round_up(sweep.head_size, kTile)),
        query_steps_(round_up((padded_head_ + A::kStep - 1) / A::kStep, kLanes)) {
    const std::int64_t rows = blocks_ * kRows;
    query_ = parts.take<Element>(rows * query_steps_);
    numerator_ = parts.take<float>(rows * round_up(padded_head_, kLanes));
    maximum_ = parts.take<float>(rows);
    denominator_ = parts.take<float>(rows);
    first_ = parts.take<std::int32_t>(rows);
    last_ = parts.take<std::int32_t>(rows);
  }

  std::int64_t blocks() const { return blocks_; }
  // Multiplications that a score takes.
  std::int64_t head_steps() const { return head_steps_; }
  // Elements of a numerator, with padding.
  std::int64_t padded_head() const { return padded_head_; }

  // One block's queries: [head steps][VECTORS][kLanes], and numerators: [padded
  // head][VECTORS][kLanes].
  const Element* query(std::int64_t block) const { return query_ + block * kRows * query_steps_; }
  float* numerator(std::int64_t block) const { return numerator_ + block * kRows * padded_head_; }
  // One block's part of each: [VECTORS][kLanes].
  float* maximum(std::int64_t block) const { return maximum_ + block * kRows; }
  float* denominator(std::int64_t block) const { return denominator_ + block * kRows; }
  const std::int32_t* first(std::int64_t block) const { return first_ + block * kRows; }
  const std::int32_t* last(std::int64_t block) const { return last_ + block * kRows; }

  // Transposes a block's queries, with zeros past the last element, and clears its state. Rows past
  // the end repeat the last one.
  void begin(std::int64_t block) {
    Element* packed = query_ + block * kRows * query_steps_;
    for (int v = 0; v < VECTORS; ++v) {
      const std::int64_t row = block * kRows + v * kLanes;
      for (std::int64_t step = 0; step < query_steps_; step += kLanes) {
        Vector square[kLanes] = {};
        const std::int64_t element = step * A::kStep;
        for (int r = 0; r < kLanes && element < sweep_.head_size; ++r) {
          const std::int64_t from = std::min(row + r, sweep_.rows - 1);
          square[r] = A::round(sweep_.query + from * sweep_.head_size + element,
                               sweep_.head_size - element);
        }
        transpose(square);
        for (int s = 0; s < kLanes; ++s) {
          std::memcpy(packed + ((step + s) * VECTORS + v) * kLanes, &square[s], sizeof(Vector));
        }
      }
      for (int r = 0; r < kLanes; ++r) {
        const std::int64_t from = std::min(row + r, sweep_.rows - 1);
        maximum_[row + r] = kNothing;
        denominator_[row + r] = 0;
        first_[row + r] = sweep_.first_key[from];
        last_[row + r] = sweep_.last_key[from];
      }
    }
    std::fill_n(numerator(block), kRows * padded_head_, 0.0F);
  }

  // Writes the state of a block to the sweep, row by row.
  void finish(std::int64_t block) const {
    for (int v = 0; v < VECTORS; ++v) {
      const std::int64_t row = block * kRows + v * kLanes;
      const std::int64_t rows = std::min<std::int64_t>(kLanes, sweep_.rows - row);
      for (std::int64_t r = 0; r < rows; ++r) {
        sweep_.maximum[row + r] = maximum_[row + r] / A::kScoreUnit;
        sweep_.denominator[row + r] = denominator_[row + r];
      }
      for (std::int64_t i = 0; i < sweep_.head_size; i += kLanes) {
        Vector square[kLanes];
        for (int s = 0; s < kLanes; ++s) {
          const std::int64_t element = std::min(i + s, padded_head_ - 1);
          square[s] = load(numerator_ + (block * padded_head_ + element) * kRows + v * kLanes);
        }
        transpose(square);
        const std::int64_t elements = std::min<std::int64_t>(kLanes, sweep_.head_size - i);
        for (std::int64_t r = 0; r < rows; ++r)
          store_some(sweep_.numerator[row + r] + i, square[r], elements);
      }
    }
  }

 private:
  const AttentionSweep& sweep_;
  std::int64_t blocks_;
  std::int64_t head_steps_;
  std::int64_t padded_head_;
  std::int64_t query_steps_;
  Element* query_;
  float* numerator_;
  float* maximum_;
  float* denominator_;
  std::int32_t* first_;
  std::int32_t* last_;
};

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
