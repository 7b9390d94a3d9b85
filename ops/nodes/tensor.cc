// SPDX-License-Identifier: Apache-2.0
#include "ops/nodes/tensor.h"

#include <algorithm>

#include "ops/error.h"

namespace flownpu {

std::size_t size_of(DataType type) {
  switch (type) {
    case DataType::kInt64:
      return 8;
    case DataType::kFloat32:
    case DataType::kInt32:
      return 4;
    case DataType::kFloat16:
    case DataType::kBFloat16:
      return 2;
    case DataType::kInt8:
    case DataType::kUInt8:
    case DataType::kBool:
    case DataType::kFloat8E8M0:
      return 1;
    case DataType::kInt4:
    case DataType::kUInt4:
      fail("expected a type whose elements have addresses, got ", name_of(type));
  }
  fail("expected a data type of this project, got number ", static_cast<int>(type));
}

std::string_view name_of(DataType type) {
  switch (type) {
    case DataType::kFloat32:
      return "float";
    case DataType::kFloat16:
      return "float16";
    case DataType::kBFloat16:
      return "bfloat16";
    case DataType::kInt64:
      return "int64";
    case DataType::kInt32:
      return "int32";
    case DataType::kInt8:
      return "int8";
    case DataType::kUInt8:
      return "uint8";
    case DataType::kBool:
      return "bool";
    case DataType::kInt4:
      return "int4";
    case DataType::kUInt4:
      return "uint4";
    case DataType::kFloat8E8M0:
      return "float8e8m0";
  }
  fail("expected a data type of this project, got number ", static_cast<int>(type));
}

Shape::Shape(std::initializer_list<std::int64_t> dims) : Shape(dims.begin(), dims.size()) {}

Shape::Shape(const std::int64_t* dims, std::size_t rank) {
  if (rank > kMaxRank)
    unsupported("expected a tensor of rank ", kMaxRank, " at most, got rank ", rank);
  std::copy_n(dims, rank, dims_.begin());
  rank_ = static_cast<int>(rank);
}

void Shape::append(std::int64_t dim) {
  if (rank_ == kMaxRank)
    unsupported("expected a tensor of rank ", kMaxRank, " at most, got one more");
  dims_[rank_++] = dim;
}

std::int64_t Shape::elements() const {
  // A 0 makes the product 0 whatever the other sizes are.
  if (std::find(begin(), end(), 0) != end()) return 0;
  std::int64_t product = 1;
  for (const std::int64_t dim : *this) {
    if (__builtin_mul_overflow(product, dim, &product))
      fail("expected a tensor that fits memory, got shape ", to_string(*this));
  }
  return product;
}

std::size_t bytes_of(DataType type, const Shape& shape) {
  const std::int64_t elements = shape.elements();
  const std::int64_t addressed = is_packed(type) ? elements / 2 + elements % 2 : elements;
  const std::size_t size = is_packed(type) ? 1 : size_of(type);
  std::int64_t bytes = 0;
  if (elements < 0 || __builtin_mul_overflow(addressed, size, &bytes))
    fail("expected a tensor that fits memory, got shape ", to_string(shape));
  return static_cast<std::size_t>(bytes);
}

bool Shape::operator==(const Shape& other) const {
  return std::equal(begin(), end(), other.begin(), other.end());
}

std::string to_string(const Shape& shape) {
  std::string text = "[";
  for (int axis = 0; axis < shape.rank(); ++axis) {
    if (axis > 0) text += ',';
    text += shape[axis] < 0 ? "?" : std::to_string(shape[axis]);
  }
  return text + "]";
}

}  // namespace flownpu
