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

#include "ops/cpu/cpu_step.h"
#include "ops/error.h"
#include "ops/node.h"
#include "ops/tensor.h"

namespace flownpu::cpu {

// Calls work.operator()<T>() for the type to compute in: float, std::int64_t or std::int32_t, the
// types that check_number() lets pass.
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

// Throws Error naming the node unless the input is there and of one of the types.
inline void check_type(const Node& node, std::size_t input,
                       std::initializer_list<DataType> expected) {
  const Value* value = node.input(input);
  std::string names;
  for (const DataType type : expected) {
    if (value != nullptr && value->type == type) return;
    names.append(names.empty() ? "" : " or ").append(name_of(type));
  }
  fail("[", to_string(node), "] expected input ", input, " to be ", names, ", got ",
       value == nullptr ? "none" : name_of(value->type));
}

// Throws Error naming the node unless with_number() has the input's type.
inline void check_number(const Node& node, std::size_t input) {
  check_type(node, input, {DataType::kFloat32, DataType::kInt64, DataType::kInt32});
}

// Throws Error naming the node unless both inputs are there and of one type.
inline void check_same_type(const Node& node, std::size_t first, std::size_t second) {
  const Value* a = node.input(first);
  const Value* b = node.input(second);
  if (a != nullptr && b != nullptr && a->type == b->type) return;
  fail("[", to_string(node), "] expected inputs ", first, " and ", second, " of one type, got ",
       a == nullptr ? "none" : name_of(a->type), " and ", b == nullptr ? "none" : name_of(b->type));
}

template <typename T>
bool is_nan(T x) {
  if constexpr (std::is_floating_point_v<T>) return std::isnan(x);
  return false;
}

// Makes a step of the class; for the lists of operators.
template <typename Made>
std::unique_ptr<Step> make(const Node& node, const Context& context) {
  return std::make_unique<Made>(node, context);
}

}  // namespace flownpu::cpu
