// SPDX-License-Identifier: Apache-2.0
// numpy's broadcasting: the shape that tensors have in common, and a walk over its elements in runs
// that a compiler can vectorise.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <type_traits>

#include "ops/cpu/thread_pool.h"
#include "ops/nodes/tensor.h"

namespace flownpu::cpu {

// The shape that two shapes broadcast to, if there is one.
std::optional<Shape> try_broadcast(const Shape& a, const Shape& b);
// The same. Throws Error naming the node if there is none.
Shape broadcast_shapes(const std::string& name, const Shape& a, const Shape& b);

// Elements that one task handles at least: 16 Ki f32 are 64 KB, some 5 us. Handing out a task takes
// about 1 us, and more if the worker fetches ahead, as it does between a decode step's products: on
// Zen 3 a Mul of 18 Ki elements took 17 us in two tasks, and 2 where the caller did both.
inline constexpr std::int64_t kElementsEach = 16 * 1024;

// Calls work(begin, end) for parts of `elements` elements, on all threads.
template <typename Work>
void in_parallel(ThreadPool& pool, std::int64_t elements, const Work& work) {
  if (elements == 0) return;
  const std::int64_t tasks = std::max<std::int64_t>(elements / kElementsEach, 1);
  pool.run(tasks, [&](std::int64_t task) {
    work(task * kElementsEach, task + 1 < tasks ? (task + 1) * kElementsEach : elements);
  });
}

// How N tensors that broadcast to one output are walked. Neighbouring axes are joined if every
// tensor advances, or stays, along both. The innermost axis that remains is a run. Along a run, a
// tensor either advances with the output (step 1) or stays at one element (step 0).
template <std::size_t N>
class Broadcast {
 public:
  using Offsets = std::array<std::int64_t, N>;

  // Each shape of `from` must broadcast to `to`.
  Broadcast(const Shape& to, const std::array<const Shape*, N>& from) {
    Offsets elements;
    elements.fill(1);
    for (int axis = -1; axis >= -to.rank(); --axis) {
      if (to[axis] == 1) continue;
      Offsets steps{};
      for (std::size_t i = 0; i < N; ++i) {
        if (-axis > from[i]->rank() || (*from[i])[axis] == 1) continue;
        steps[i] = elements[i];
        elements[i] *= to[axis];
      }
      add_axis(to[axis], steps);
    }
    if (axes_ == 0) add_axis(1, {});
  }

  int step(std::size_t tensor) const { return static_cast<int>(axis_[0].steps[tensor]); }

  // Calls run(first, count, offsets) for the output's elements [begin, end): element `first + i` is
  // element `offsets[n] + i step(n)` of tensor n, for i < count.
  template <typename Run>
  void walk(std::int64_t begin, std::int64_t end, const Run& run) const {
    while (begin < end) {
      const std::int64_t first = begin % axis_[0].size;
      const std::int64_t count = std::min(axis_[0].size - first, end - begin);
      Offsets offsets{};
      std::int64_t rest = begin / axis_[0].size;
      for (std::size_t i = 0; i < N; ++i) offsets[i] = first * axis_[0].steps[i];
      for (int axis = 1; axis < axes_; ++axis) {
        const std::int64_t coordinate = rest % axis_[axis].size;
        rest /= axis_[axis].size;
        for (std::size_t i = 0; i < N; ++i) offsets[i] += coordinate * axis_[axis].steps[i];
      }
      run(begin, count, offsets);
      begin += count;
    }
  }

 private:
  struct Axis {
    std::int64_t size = 1;
    Offsets steps{};
  };

  // Adds the next outer axis. Joins it to the inner axis if every tensor has the same step across
  // both.
  void add_axis(std::int64_t size, const Offsets& steps) {
    if (axes_ > 0) {
      Axis& inner = axis_[axes_ - 1];
      bool alike = true;
      for (std::size_t i = 0; i < N; ++i) alike &= steps[i] == inner.steps[i] * inner.size;
      if (alike) {
        inner.size *= size;
        return;
      }
    }
    axis_[axes_++] = {.size = size, .steps = steps};
  }

  // Innermost first.
  std::array<Axis, Shape::kMaxRank> axis_{};
  int axes_ = 0;
};

// Calls work(step) with a step of 0 or 1 as a constant, for loops that are compiled for each.
template <typename Work>
void with_step(int step, const Work& work) {
  if (step == 0) {
    work(std::integral_constant<int, 0>());
  } else {
    work(std::integral_constant<int, 1>());
  }
}

}  // namespace flownpu::cpu
