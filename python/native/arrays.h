// SPDX-License-Identifier: Apache-2.0
// What Python passes for a tensor: its type's name, for numpy has no bfloat16, and its memory.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ops/error.h"
#include "ops/tensor.h"

namespace flownpu::native {

using Array = nanobind::ndarray<nanobind::c_contig, nanobind::device::cpu>;
// None: an absent input.
using Argument = std::optional<std::pair<std::string, Array>>;

// Throws Error if there is no such type.
inline DataType type_of(const std::string& name) {
  for (int i = 0; i <= static_cast<int>(DataType::kBool); ++i) {
    const auto type = static_cast<DataType>(i);
    if (name_of(type) == name) return type;
  }
  fail("expected the name of a data type, got '", name, "'");
}

inline Shape shape_of(const Array& array) {
  Shape shape;
  for (std::size_t axis = 0; axis < array.ndim(); ++axis)
    shape.append(static_cast<std::int64_t>(array.shape(axis)));
  return shape;
}

inline Tensor tensor_of(const Argument& argument) {
  if (!argument) return {};
  return {argument->second.data(), type_of(argument->first), shape_of(argument->second)};
}

inline std::vector<Tensor> tensors_of(const std::vector<Argument>& arguments) {
  std::vector<Tensor> tensors;
  for (const Argument& argument : arguments) tensors.push_back(tensor_of(argument));
  return tensors;
}

}  // namespace flownpu::native
