// SPDX-License-Identifier: Apache-2.0
// How reductions and pools add elements up.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "ops/cpu/elements.h"
#include "ops/cpu/kernels.h"

namespace flownpu::cpu {

// The type of a running sum. It is double for floats. The sum of n is off by at most n 2^-53 of the
// sum of their magnitudes, and by the rounding to float, so even a sum of 2^29 is right to one ulp.
// For integers it holds the sum of as many as fit in memory.
__extension__ typedef __int128 LongInteger;
template <typename T>
using WideInteger = std::conditional_t<sizeof(T) < 8, std::int64_t, LongInteger>;
template <typename T>
using WideSum = std::conditional_t<std::is_integral_v<T>, WideInteger<T>, double>;

// How a reduction starts, how it adds an element, and what it makes of the total of `count`
// elements.
struct Sum {
  template <typename T>
  using Total = WideSum<T>;
  template <typename T>
  static Total<T> start() {
    return 0;
  }
  template <typename T>
  static Total<T> add(Total<T> sum, T x) {
    return sum + static_cast<Total<T>>(x);
  }
  static void add_row(const Kernels& kernels, const float* x, std::int64_t n, double& sum) {
    sum += kernels.sum(x, n);
  }
  // An integer that the type does not hold becomes the nearest that it does, as in ONNX Runtime.
  template <typename T>
  static T finish(Total<T> sum, std::int64_t /*count*/) {
    if constexpr (std::is_integral_v<T>) {
      constexpr Total<T> kLowest = std::numeric_limits<T>::lowest();
      constexpr Total<T> kHighest = std::numeric_limits<T>::max();
      return static_cast<T>(sum < kLowest ? kLowest : sum > kHighest ? kHighest : sum);
    } else {
      return static_cast<T>(sum);
    }
  }
};
// The mean of integers is rounded towards zero.
struct Mean : Sum {
  template <typename T>
  static T finish(Total<T> sum, std::int64_t count) {
    return static_cast<T>(sum / static_cast<Total<T>>(count));
  }
};
// The result is NaN if any element is, as in IEEE 754's maximum; in ONNX Runtime only if the first
// one is.
struct Extreme {
  template <typename T>
  using Total = T;
  template <typename T>
  static T finish(T extreme, std::int64_t /*count*/) {
    return extreme;
  }
};
struct Largest : Extreme {
  template <typename T>
  static T start() {
    return std::is_integral_v<T> ? std::numeric_limits<T>::lowest()
                                 : -std::numeric_limits<T>::infinity();
  }
  template <typename T>
  static T add(T largest, T x) {
    return x > largest || is_nan(x) ? x : largest;
  }
  static void add_row(const Kernels& kernels, const float* x, std::int64_t n, float& largest) {
    largest = add(largest, kernels.largest(x, n));
  }
};
struct Smallest : Extreme {
  template <typename T>
  static T start() {
    return std::is_integral_v<T> ? std::numeric_limits<T>::max()
                                 : std::numeric_limits<T>::infinity();
  }
  template <typename T>
  static T add(T smallest, T x) {
    return x < smallest || is_nan(x) ? x : smallest;
  }
  static void add_row(const Kernels& kernels, const float* x, std::int64_t n, float& smallest) {
    smallest = add(smallest, kernels.smallest(x, n));
  }
};

}  // namespace flownpu::cpu
