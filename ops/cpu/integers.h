// SPDX-License-Identifier: Apache-2.0
// Integers in tensors: indices, axes and sizes.
#pragma once

#include <cstdint>
#include <string>

#include "ops/error.h"
#include "ops/node.h"
#include "ops/tensor.h"

namespace flownpu::cpu {

inline std::int64_t integer_at(const Tensor& tensor, std::int64_t i) {
  return tensor.type == DataType::kInt64 ? tensor.as<const std::int64_t>()[i]
                                         : tensor.as<const std::int32_t>()[i];
}

// Throws Error unless the input is there and holds integers.
inline void check_integers(const Node& node, std::size_t input) {
  const Value* value = node.input(input);
  if (value == nullptr || (value->type != DataType::kInt64 && value->type != DataType::kInt32)) {
    fail("[", to_string(node), "] expected input ", input, " to be int64 or int32, got ",
         value == nullptr ? "none" : name_of(value->type));
  }
}

// The index, counted from the end if it is negative. Throws Error if it is outside.
inline std::int64_t wrap(const std::string& name, std::int64_t index, std::int64_t size) {
  if (index < -size || index >= size)
    fail("[", name, "] expected an index in [-", size, ", ", size, "), got ", index);
  return index < 0 ? index + size : index;
}

}  // namespace flownpu::cpu
