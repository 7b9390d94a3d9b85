// SPDX-License-Identifier: Apache-2.0
// One token of linear attention: the state is read once, changed, and read by the queries.
//
// Dataflow: the state S f32 [key_size][value_size] is walked in strips of 32 columns, because the
// columns of S are independent. In a strip the first walk over the rows makes the prediction S^T k
// in registers, the second changes each row and adds it to the first query's output, also in
// registers. Further queries walk the changed strip, which is in the first cache.
#include <algorithm>

#include "ops/cpu/kernels.h"
#include "ops/cpu/kernels/tables.h"
#include "ops/cpu/kernels/vector.h"

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// The columns of a strip: VECTORS vectors, of which the last has `last` elements.
template <int VECTORS>
struct Strip {
  std::int64_t last;

  void load(const float* x, Vector (&v)[VECTORS]) const {
    for (int i = 0; i + 1 < VECTORS; ++i) v[i] = FLOWNPU_ISA::load(x + i * kLanes);
    v[VECTORS - 1] = load_some(x + (VECTORS - 1) * kLanes, last);
  }
  void store(float* y, const Vector (&v)[VECTORS]) const {
    for (int i = 0; i + 1 < VECTORS; ++i) FLOWNPU_ISA::store(y + i * kLanes, v[i]);
    store_some(y + (VECTORS - 1) * kLanes, v[VECTORS - 1], last);
  }
};

template <int VECTORS>
void step_columns(const RecurrenceStep& step, std::int64_t column, std::int64_t last) {
  const Strip<VECTORS> strip{last};
  const std::int64_t width = step.value_size;
  float* state = step.state + column;
  const auto decay = [&](std::int64_t row) {
    return step.decay == nullptr ? 1.0F : step.decay[step.decay_per_row ? row : 0];
  };

  Vector change[VECTORS];
  strip.load(step.value + column, change);
  if (step.is_delta) {
    Vector predicted[VECTORS] = {};
    for (std::int64_t row = 0; row < step.key_size; ++row) {
      Vector s[VECTORS];
      strip.load(state + row * width, s);
      const Vector factor = broadcast(step.key[row] * decay(row));
      for (int i = 0; i < VECTORS; ++i) predicted[i] += factor * s[i];
    }
    for (int i = 0; i < VECTORS; ++i) change[i] = step.beta * (change[i] - predicted[i]);
  }

  Vector output[VECTORS] = {};
  for (std::int64_t row = 0; row < step.key_size; ++row) {
    Vector s[VECTORS];
    strip.load(state + row * width, s);
    const Vector kept = broadcast(decay(row));
    const Vector key = broadcast(step.key[row]);
    const Vector query = broadcast(step.query[row]);
    for (int i = 0; i < VECTORS; ++i) {
      s[i] = kept * s[i] + key * change[i];
      output[i] += query * s[i];
    }
    strip.store(state + row * width, s);
  }
  for (std::int64_t query = 0;;) {
    for (int i = 0; i < VECTORS; ++i) output[i] *= step.scale;
    strip.store(step.output + query * width + column, output);
    if (++query == step.queries) break;
    for (Vector& sum : output) sum = Vector{};
    for (std::int64_t row = 0; row < step.key_size; ++row) {
      Vector s[VECTORS];
      strip.load(state + row * width, s);
      const Vector factor = broadcast(step.query[query * step.key_size + row]);
      for (int i = 0; i < VECTORS; ++i) output[i] += factor * s[i];
    }
  }
}

void recurrence_step(const RecurrenceStep& step) {
  // 128 bytes: the strip of a state with 128 rows is 16 KB, half of the first cache.
  constexpr int kVectors = 32 / kLanes;
  std::int64_t column = 0;
  for (; column + kVectors * kLanes <= step.value_size; column += kVectors * kLanes)
    step_columns<kVectors>(step, column, kLanes);
  for (; column < step.value_size; column += kLanes)
    step_columns<1>(step, column, std::min<std::int64_t>(kLanes, step.value_size - column));
}

}  // namespace

void fill_recurrence(Kernels& kernels) { kernels.recurrence_step = recurrence_step; }

}  // namespace flownpu::cpu::FLOWNPU_ISA
