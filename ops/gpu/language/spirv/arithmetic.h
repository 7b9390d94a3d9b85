// SPDX-License-Identifier: Apache-2.0
// Arithmetic, conversions and memory for values (values.h).
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ops/gpu/language/spirv/module.h"
#include "ops/gpu/language/spirv/values.h"

namespace flownpu::gpu::spirv {

// Throws Error where the language does not have an operation for the values' types.
class Arithmetic {
 public:
  explicit Arithmetic(Module& module) : module_(module) {}

  Id id_of(Scalar scalar);
  Id id_of(const Type& type) { return id_of(type.scalar); }
  Value integer(std::int64_t number, Scalar scalar = Scalar::kInt);
  Value real(float number);

  // The component as an id of its type's own; bytes as an int.
  Id component(const Value& value, std::size_t which);
  // Bytes as words of four, which are uints.
  std::vector<Id> words(const Value& value);

  Value converted(const Value& value, const Type& type);
  // The same bits as another type.
  Value reinterpreted(const Value& value, const Type& type);
  Id condition(const Value& value);
  Value binary(std::string_view sign, Value left, Value right);
  Value negated(const Value& value);
  Value inverted(const Value& value);
  Value denied(const Value& value);
  Value selected(Id condition, const Value& left, const Value& right);
  // The type in which C computes with both.
  static Type common(const Type& left, const Type& right);
  void match(Value& left, Value& right);
  Value mapped(Function function, const std::vector<Value>& operands);

  Value load(const Place& place);
  void store(const Place& place, const Value& value);
  // A pointer to an element of the place's array, `offset` behind its index.
  Id element(const Place& place, std::int64_t offset);
  // The place's array at an index of its first axis that has none.
  Place at(Place place, const Value& index);

 private:
  Value of_bytes(std::string_view sign, const Value& left, const Value& right);
  Id load_from(const Place& place, Id pointer, Scalar stored);
  void store_to(const Place& place, Id pointer, Id value);

  Module& module_;
};

}  // namespace flownpu::gpu::spirv
