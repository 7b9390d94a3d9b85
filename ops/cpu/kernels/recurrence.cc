// SPDX-License-Identifier: Apache-2.0
// Linear attention of a sequence with one state, token after token.
//
// Dataflow: the columns of the state S f32 [key_size][value_size] do not depend on each other. A
// strip of four vectors is copied to contiguous memory, where it stays in the first cache (32 KB
// for 128 rows and vectors of 16) while all tokens go by, and is then copied to its place. Two
// vectors took 1.2 times as long on Zen 5, where their sums wait for one another. Each token walks
// the strip once: a row gets the change of the token before, is added to that token's output, and
// to the prediction S^T k of this token, all in registers. So a token costs one load, one store and
// four multiplications of the state. Chunks of 64 tokens in matrix products took longer on Zen 4:
// 72 instead of 48 us a token for 32 heads of 128 x 128, three quarters of it in products of f32.
#include <algorithm>

#include "ops/cpu/kernels.h"
#include "ops/cpu/kernels/tables.h"
#include "ops/cpu/kernels/vector.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

constexpr int kVectors = 4;
constexpr std::int64_t kColumns = kVectors * kLanes;
static_assert(kColumns <= kRecurrenceColumns);

// Columns [column, column + count) of the state, as VECTORS vectors. Columns of the strip beyond
// `count` are 0.
template <int VECTORS>
class Strip {
 public:
  // `in_place`: the state is in call.present, and changed there.
  Strip(const Recurrence& call, std::int64_t column, std::int64_t count, bool in_place)
      : call_(call), column_(column), count_(count), in_place_(in_place && count == kColumns) {
    if (in_place_) return;
    if (count < kColumns) std::fill_n(call.strip, call.key_size * kColumns, 0.0F);
    for (std::int64_t row = 0; row < call.key_size; ++row) {
      const float* from =
          call.past == nullptr ? nullptr : call.past + row * call.value_size + column;
      each([&](int i, std::int64_t elements) {
        const Vector kept = from == nullptr ? Vector{} : load_some(from + i * kLanes, elements);
        store(at(row) + i * kLanes, kept);
      });
    }
  }

  void run() {
    for (std::int64_t token = 0; token <= call_.tokens; ++token) {
      const bool changes = token > 0;
      const bool predicts = token < call_.tokens && call_.beta != nullptr;
      Vector output[VECTORS] = {};
      Vector predicted[VECTORS] = {};
      if (changes && predicts) {
        walk<true, true>(token, output, predicted);
      } else if (changes) {
        walk<true, false>(token, output, predicted);
      } else if (predicts) {
        walk<false, true>(token, output, predicted);
      }
      if (changes) write(token - 1, output);
      if (token < call_.tokens) change(token, predicted);
    }
    if (in_place_) return;
    for (std::int64_t row = 0; row < call_.key_size; ++row) {
      float* to = call_.present + row * call_.value_size + column_;
      each([&](int i, std::int64_t elements) {
        store_some(to + i * kLanes, load(at(row) + i * kLanes), elements);
      });
    }
  }

 private:
  // Calls visit(i, elements) for the vectors that have columns of the state; for a whole strip, as
  // most are, with constants.
  template <typename Visit>
  void each(const Visit& visit) const {
    if (count_ == kColumns) {
      for (int i = 0; i < VECTORS; ++i) visit(i, kLanes);
    } else {
      for (int i = 0; i * kLanes < count_; ++i)
        visit(i, std::min<std::int64_t>(kLanes, count_ - i * kLanes));
    }
  }

  float* at(std::int64_t row) const {
    return in_place_ ? call_.present + row * call_.value_size + column_
                     : call_.strip + row * kColumns;
  }
  const float* key(std::int64_t token) const { return call_.key + token * call_.key_stride; }
  // The factor of each row, or of all rows.
  const float* decay(std::int64_t token) const { return call_.decay + token * call_.decays; }

  // The change of the token before, and the prediction of this one.
  template <bool CHANGES, bool PREDICTS>
  void walk(std::int64_t token, Vector (&output)[VECTORS], Vector (&predicted)[VECTORS]) {
    const bool by_row = call_.decays > 1;
    const float* last_key = CHANGES ? key(token - 1) : nullptr;
    const float* last_decay = CHANGES ? decay(token - 1) : nullptr;
    const float* query = CHANGES ? call_.query + (token - 1) * call_.query_stride : nullptr;
    const float* next_key = PREDICTS ? key(token) : nullptr;
    const float* next_decay = PREDICTS ? decay(token) : nullptr;
    for (std::int64_t row = 0; row < call_.key_size; ++row) {
      float* const state = at(row);
      Vector s[VECTORS];
      for (int i = 0; i < VECTORS; ++i) s[i] = load(state + i * kLanes);
      if constexpr (CHANGES) {
        const Vector kept = broadcast(last_decay[by_row ? row : 0]);
        const Vector factor = broadcast(last_key[row]);
        const Vector asked = broadcast(query[row]);
        for (int i = 0; i < VECTORS; ++i) {
          s[i] = kept * s[i] + factor * change_[i];
          output[i] += asked * s[i];
          store(state + i * kLanes, s[i]);
        }
      }
      if constexpr (PREDICTS) {
        const Vector factor = broadcast(next_key[row] * next_decay[by_row ? row : 0]);
        for (int i = 0; i < VECTORS; ++i) predicted[i] += factor * s[i];
      }
    }
  }

  // The change that each unit of the key adds to the state.
  void change(std::int64_t token, const Vector (&predicted)[VECTORS]) {
    const float* value = call_.value + token * call_.value_stride + column_;
    each([&](int i, std::int64_t elements) {
      change_[i] = load_some(value + i * kLanes, elements);
      if (call_.beta != nullptr)
        change_[i] = call_.beta[token * call_.beta_stride] * (change_[i] - predicted[i]);
    });
  }

  // The token's output of the first query; that of others reads the strip again.
  void write(std::int64_t token, const Vector (&first)[VECTORS]) {
    float* to = call_.output + token * call_.output_stride + column_;
    write_one(to, first);
    for (std::int64_t query = 1; query < call_.queries; ++query) {
      const float* from = call_.query + token * call_.query_stride + query * call_.key_size;
      Vector output[VECTORS] = {};
      for (std::int64_t row = 0; row < call_.key_size; ++row) {
        const Vector asked = broadcast(from[row]);
        for (int i = 0; i < VECTORS; ++i) output[i] += asked * load(at(row) + i * kLanes);
      }
      write_one(to + query * call_.value_size, output);
    }
  }
  void write_one(float* to, const Vector (&output)[VECTORS]) const {
    each([&](int i, std::int64_t elements) {
      store_some(to + i * kLanes, output[i] * call_.scale, elements);
    });
  }

  const Recurrence& call_;
  std::int64_t column_;
  std::int64_t count_;
  bool in_place_;
  Vector change_[VECTORS] = {};
};

// Up to so many tokens do not pay for the copies of a strip: one token of 32 heads of 128 x 128
// took 153 us with them on one thread of Zen 4, and takes 119 on the state as it lies, copied in
// one go. One token's strips read from where the state was, and written past the caches, took
// 1.36 times as long as that copy on Zen 3: memory is read in lines far apart.
constexpr std::int64_t kFewTokens = 4;

void recurrence(const Recurrence& call) {
  const bool in_place = call.tokens <= kFewTokens;
  const std::int64_t elements = call.key_size * call.value_size;
  if (in_place && call.past == nullptr) std::fill_n(call.present, elements, 0.0F);
  if (in_place && call.past != nullptr && call.past != call.present)
    std::copy_n(call.past, elements, call.present);
  for (std::int64_t column = 0; column < call.value_size; column += kColumns)
    Strip<kVectors>(call, column, std::min(kColumns, call.value_size - column), in_place).run();
}

}  // namespace

void fill_recurrence(Kernels& kernels) { kernels.recurrence = recurrence; }

}  // namespace flownpu::cpu::FLOWNPU_ISA
