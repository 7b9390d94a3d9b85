// SPDX-License-Identifier: Apache-2.0
// Loops that are compiled once for each type of element, or once for each size where only bytes are
// moved.
#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <type_traits>

#include "ops/cpu/step.h"
#include "ops/error.h"
#include "ops/nodes/node.h"
#include "ops/nodes/tensor.h"

namespace flownpu::cpu {

// Calls work.operator()<T>() for the type to compute in: float, std::int64_t or std::int32_t (a
// contract's kNumbers).
template <typename Work>
void with_number(DataType type, const Work& work) {
  if (type == DataType::kInt64) return work.template operator()<std::int64_t>();
  if (type == DataType::kInt32) return work.template operator()<std::int32_t>();
  work.template operator()<float>();
}

// Calls work.operator()<T>() for an unsigned integer of the element's size.
template <typename Work>
void with_bytes(DataType type, const Work& work) {
  switch (size_of(type)) {
    case 8:
      return work.template operator()<std::uint64_t>();
    case 4:
      return work.template operator()<std::uint32_t>();
    case 2:
      return work.template operator()<std::uint16_t>();
    default:
      return work.template operator()<std::uint8_t>();
  }
}

template <typename T>
bool is_nan(T x) {
  if constexpr (std::is_floating_point_v<T>) return std::isnan(x);
  return false;
}

}  // namespace flownpu::cpu
