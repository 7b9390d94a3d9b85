// SPDX-License-Identifier: Apache-2.0
// Element types, shapes and tensor views, which the EP and the devices share.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

namespace flownpu {

enum class DataType : std::uint8_t {
  kFloat32,
  kFloat16,
  kBFloat16,
  kInt64,
  kInt32,
  kInt8,
  kUInt8,
  kBool,
  // Two elements to a byte, the first in the low half; rows are not padded.
  kInt4,
  kUInt4,
  // Powers of two: 2^(byte - 127); 255 is no number.
  kFloat8E8M0,
};
// All types are the numbers up to this one.
inline constexpr int kDataTypes = static_cast<int>(DataType::kFloat8E8M0) + 1;

// The size of one element in bytes. Throws Error for a type of 4 bits.
std::size_t size_of(DataType type);
// Whether two elements share a byte.
constexpr bool is_packed(DataType type) {
  return type == DataType::kInt4 || type == DataType::kUInt4;
}
// ONNX's name of the type: "float", "bfloat16", ...
std::string_view name_of(DataType type);

// Dimensions, outermost first. Held inline, so that shape inference in a decode step allocates
// nothing.
class Shape {
 public:
  // Language models' graphs have ranks of up to 5 (batch, groups, heads, tokens, head size).
  static constexpr int kMaxRank = 8;

  Shape() = default;
  Shape(std::initializer_list<std::int64_t> dims);
  // Throws Unsupported if rank exceeds kMaxRank.
  Shape(const std::int64_t* dims, std::size_t rank);

  int rank() const { return rank_; }
  // Negative axes count from the end, as in numpy.
  std::int64_t operator[](int axis) const { return dims_[axis < 0 ? axis + rank_ : axis]; }
  std::int64_t& operator[](int axis) { return dims_[axis < 0 ? axis + rank_ : axis]; }
  const std::int64_t* begin() const { return dims_.data(); }
  const std::int64_t* end() const { return dims_.data() + rank_; }
  // Throws Unsupported if there are kMaxRank already.
  void append(std::int64_t dim);
  // The product of all dimensions: 1 for a scalar, 0 if any is 0. Throws Error if it overflows.
  std::int64_t elements() const;
  bool operator==(const Shape& other) const;

 private:
  std::array<std::int64_t, kMaxRank> dims_{};
  int rank_ = 0;
};

// "[1,2,3]"; a dimension of -1 (known only at run time) prints as "?".
std::string to_string(const Shape& shape);
// The size of a tensor in bytes. Throws Error if it exceeds the range of a signed 64-bit integer.
std::size_t bytes_of(DataType type, const Shape& shape);

// The tokens of a view if a prompt is computed slice by slice (ops/nodes/slicing.h): its axis 1
// begins with token `first` of the prompt's `tokens`. tokens = 0: the view is not a slice, but
// holds all tokens.
struct TokenSlice {
  std::int64_t first = 0;
  std::int64_t tokens = 0;
};

// A view of dense, row-major data, which it does not own. `data` may be null if the shape has no
// elements, and is null for an absent optional input.
struct Tensor {
  void* data = nullptr;
  DataType type = DataType::kFloat32;
  Shape shape;
  TokenSlice slice = {};

  bool present() const { return data != nullptr || shape.rank() > 0; }
  // The size of the data in bytes. Throws Error if it exceeds the range of a signed 64-bit integer.
  std::size_t bytes() const { return bytes_of(type, shape); }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

}  // namespace flownpu
