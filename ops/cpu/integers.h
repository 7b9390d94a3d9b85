// SPDX-License-Identifier: Apache-2.0
// Integers in tensors: indices, axes and sizes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ops/error.h"
#include "ops/nodes/node.h"
#include "ops/nodes/tensor.h"

namespace flownpu::cpu {

inline std::int64_t integer_at(const Tensor& tensor, std::int64_t i) {
  return tensor.type == DataType::kInt64 ? tensor.as<const std::int64_t>()[i]
                                         : tensor.as<const std::int32_t>()[i];
}

// An element of int8 or uint8.
inline int byte_at(const Tensor& tensor, std::int64_t i) {
  return tensor.type == DataType::kInt8 ? tensor.as<const std::int8_t>()[i]
                                        : tensor.as<const std::uint8_t>()[i];
}

// Whether the node lists the input, and it is not absent.
inline bool is_given(std::span<const Tensor> inputs, std::size_t index) {
  return index < inputs.size() && inputs[index].present();
}

// The index, counted from the end if it is negative. Throws Error naming the node if it is outside
// [-size, size).
inline std::int64_t wrap(const std::string& name, std::int64_t index, std::int64_t size) {
  if (index < -size || index >= size)
    fail("[", name, "] expected an index in [-", size, ", ", size, "), got ", index);
  return index < 0 ? index + size : index;
}

// Some of a tensor's axes.
class AxisSet {
 public:
  void add(std::int64_t axis) { is_[static_cast<std::size_t>(axis)] = true; }
  bool has(std::int64_t axis) const { return is_[static_cast<std::size_t>(axis)]; }

 private:
  std::array<bool, Shape::kMaxRank> is_{};
};

// The axes that the tensor's elements name, in a tensor of that rank. Throws Error naming the node
// if one is out of range. Throws Unsupported if one is named twice; ONNX Runtime's reductions
// accept that.
inline AxisSet axes_in(const std::string& name, const Tensor& tensor, std::int64_t rank) {
  AxisSet axes;
  for (std::int64_t i = 0; i < tensor.shape.elements(); ++i) {
    const std::int64_t axis = wrap(name, integer_at(tensor, i), rank);
    if (axes.has(axis))
      unsupported("[", name, "] expected each axis once, got axis ", axis, " twice");
    axes.add(axis);
  }
  return axes;
}

// The same for axes that are an attribute.
inline AxisSet axes_in(const std::string& name, const std::vector<std::int64_t>& list,
                       std::int64_t rank) {
  AxisSet axes;
  for (const std::int64_t item : list) {
    const std::int64_t axis = wrap(name, item, rank);
    if (axes.has(axis))
      unsupported("[", name, "] expected each axis once, got axis ", axis, " twice");
    axes.add(axis);
  }
  return axes;
}

// The tensor's elements as a shape. Throws Error naming the node if one is negative.
inline Shape shape_in(const std::string& name, const Tensor& tensor) {
  Shape shape;
  for (std::int64_t i = 0; i < tensor.shape.elements(); ++i) {
    const std::int64_t size = integer_at(tensor, i);
    if (size < 0) fail("[", name, "] expected sizes of 0 and more, got ", size);
    shape.append(size);
  }
  return shape;
}

}  // namespace flownpu::cpu
