// SPDX-License-Identifier: Apache-2.0
// Values: what an expression of a kernel's text gives, as the ids of its components. Vectors exist
// only as their components: GPUs compute each of them by itself, and their compilers take vectors
// apart.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ops/gpu/language/spirv/module.h"

namespace flownpu::gpu::spirv {

// kChar and kUchar: 8 bits of a word, as arithmetic they are kInt.
// kLeft, kRight, kSum: matrices, of which the id is the whole.
enum class Scalar : std::uint8_t { kBool, kInt, kUint, kFloat, kChar, kUchar, kLeft, kRight, kSum };

struct Type {
  Scalar scalar = Scalar::kInt;
  int width = 1;
  bool operator==(const Type&) const = default;
  bool is_byte() const { return scalar == Scalar::kChar || scalar == Scalar::kUchar; }
  bool is_matrix() const { return scalar >= Scalar::kLeft; }
  bool is_float() const { return scalar == Scalar::kFloat; }
};

// kWhole: the id is the component. Else it is a uint, of which this byte is the component.
struct Component {
  static constexpr int kWhole = -1;
  Id id = 0;
  int byte = kWhole;
};

struct Value {
  Type type;
  std::vector<Component> components = {};
  // The value, if it is an integer that is known when the kernel is generated.
  std::optional<std::int64_t> constant = std::nullopt;
};

// Where a value can be: components are variables; or elements of an array, which is one of the
// function's or of the work-group's.
struct Place {
  Type type;
  std::vector<Id> variables = {};
  Id array = 0;
  Class storage = Class::kFunction;
  // The type of the array's elements, and the index of the place's first component among them.
  Scalar stored = Scalar::kInt;
  Value index = {};
  // Sizes of the array's axes that have no index yet.
  std::vector<std::int64_t> sizes = {};
};

// A memory operand: other lanes access the same memory, in an order that barriers make.
inline constexpr std::uint32_t kNonPrivate = 0x20;

// A tensor of the kernel: its number among the arguments.
struct TensorName {
  std::uint32_t number = 0;
};

}  // namespace flownpu::gpu::spirv
