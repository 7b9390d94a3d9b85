// SPDX-License-Identifier: Apache-2.0
// The form in which Python passes a tensor: its type's name, because NumPy has no bfloat16, and an
// array with its memory.
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
#include "ops/nodes/tensor.h"

namespace flownpu::native {

using Array = nanobind::ndarray<nanobind::c_contig, nanobind::device::cpu>;
// Also accepts read-only arrays.
using ConstArray = nanobind::ndarray<nanobind::ro, nanobind::c_contig, nanobind::device::cpu>;
// A tensor's type and memory; nullopt (None in Python) for an absent input or output.
using Argument = std::optional<std::pair<std::string, Array>>;
using Input = std::optional<std::pair<std::string, ConstArray>>;

// The type with this name ("float"). Throws Error if there is none.
inline DataType type_of(const std::string& name) {
  for (int i = 0; i < kDataTypes; ++i) {
    const auto type = static_cast<DataType>(i);
    if (name_of(type) == name) return type;
  }
  fail("expected the name of a data type, got '", name, "'");
}

template <typename AnyArray>
Shape shape_of(const AnyArray& array) {
  Shape shape;
  for (std::size_t axis = 0; axis < array.ndim(); ++axis)
    shape.append(static_cast<std::int64_t>(array.shape(axis)));
  return shape;
}

// A view of the memory of an Argument or an Input. The memory of an Input must not be written.
// Throws Error if the memory's size does not fit the type and shape.
template <typename Given>
Tensor tensor_of(const Given& given) {
  if (!given) return {};
  const auto& [type, array] = *given;
  const Tensor tensor{const_cast<void*>(static_cast<const void*>(array.data())), type_of(type),
                      shape_of(array)};
  if (tensor.bytes() != array.nbytes())
    fail("expected ", tensor.bytes(), " bytes of ", type, ", got ", array.nbytes());
  return tensor;
}

template <typename Given>
std::vector<Tensor> tensors_of(const std::vector<Given>& given) {
  std::vector<Tensor> tensors;
  for (const Given& one : given) tensors.push_back(tensor_of(one));
  return tensors;
}

}  // namespace flownpu::native
