// SPDX-License-Identifier: Apache-2.0
// Contract: what a device takes of an operator, said once. Opsets, inputs, outputs, attributes,
// element types and shapes; a node with anything else is not taken, and the reason says what that
// is. docs/operators.md has the table that is made of these.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

#include "ops/nodes/node.h"
#include "ops/nodes/tensor.h"

namespace flownpu {

// A set of element types.
class Types {
 public:
  constexpr Types() = default;
  constexpr Types(std::initializer_list<DataType> types) {
    for (const DataType type : types) bits_ |= bit(type);
  }
  constexpr bool none() const { return bits_ == 0; }
  constexpr bool has(DataType type) const { return (bits_ & bit(type)) != 0; }

 private:
  static constexpr unsigned bit(DataType type) { return 1U << static_cast<unsigned>(type); }
  unsigned bits_ = 0;
};
// "float or int64".
std::string to_string(Types types);

inline constexpr Types kNone{};
inline constexpr Types kFloat{DataType::kFloat32};
inline constexpr Types kBool{DataType::kBool};
inline constexpr Types kInt32{DataType::kInt32};
inline constexpr Types kInt64{DataType::kInt64};
inline constexpr Types kIntegers{DataType::kInt64, DataType::kInt32};
inline constexpr Types kNumbers{DataType::kFloat32, DataType::kInt64, DataType::kInt32};
inline constexpr Types kBytes{DataType::kInt8, DataType::kUInt8};
inline constexpr Types kFloats{DataType::kFloat32, DataType::kFloat16, DataType::kBFloat16};
// A KV cache's: int8 has a scale in each row (ops/nodes/flow_qkv_attention.h).
inline constexpr Types kCacheTypes{DataType::kFloat32, DataType::kFloat16, DataType::kBFloat16,
                                   DataType::kInt8};
inline constexpr Types kAnyType{DataType::kFloat32, DataType::kFloat16, DataType::kBFloat16,
                                DataType::kInt64,   DataType::kInt32,   DataType::kInt8,
                                DataType::kUInt8,   DataType::kBool};

// A shape in capital letters: "[N,C,H,W]", "[..,K]" (any axes before), "[B,S,?]" (any length),
// "[B,1]", "" (any shape). A letter stands for one length in all shapes of a contract.
class ShapePattern {
 public:
  constexpr ShapePattern() = default;
  // A constant; whatever is no pattern does not compile.
  consteval ShapePattern(const char* text) : text_(text) {  // NOLINT(google-explicit-constructor)
    if (text_.empty()) return;
    if (text_.front() != '[' || text_.back() != ']') throw std::invalid_argument("expected [..]");
    std::string_view rest = text_.substr(1, text_.size() - 2);
    while (!rest.empty()) {
      const std::size_t comma = rest.find(',');
      const std::string_view axis = rest.substr(0, comma);
      rest = comma == std::string_view::npos ? "" : rest.substr(comma + 1);
      if (axis == "..") {
        open_ = true;
      } else {
        axes_[static_cast<std::size_t>(rank_++)] = axis.front();
      }
    }
  }

  constexpr std::string_view text() const { return text_; }
  constexpr bool any() const { return text_.empty(); }
  // Axes that are named, and whether there may be more before them.
  constexpr int rank() const { return rank_; }
  constexpr bool open() const { return open_; }
  // A letter, a digit or '?'.
  constexpr char axis(int index) const { return axes_[static_cast<std::size_t>(index)]; }

 private:
  std::string_view text_;
  std::array<char, Shape::kMaxRank> axes_{};
  int rank_ = 0;
  bool open_ = false;
};

enum class Presence : std::uint8_t {
  kRequired,
  kOptional,
  // It and any number more of its kind; the last of a list.
  kVariadic,
  // An attribute that is a tensor, which stands behind the inputs (Node::tensor_attributes).
  kAttribute,
};

// An input or an output.
struct Port {
  std::string_view name;
  Types types = kAnyType;
  Presence presence = Presence::kRequired;
  ShapePattern shape = {};
  // Ports with the same letter are of one type; 0: of any of `types`.
  char type_letter = 0;
  // It must be known when the node is prepared.
  bool constant = false;
  // What to do about a node that has another: "export with float32 inputs".
  std::string_view advice = {};
};

// An attribute and the values of it that are taken.
struct AttributeRule {
  enum class Kind : std::uint8_t { kInteger, kNumber, kText, kIntegers };

  std::string_view name;
  Kind kind = Kind::kInteger;
  bool required = false;
  // Bounds of an integer or of each in a list; then those of a number.
  std::int64_t lowest = std::numeric_limits<std::int64_t>::min();
  std::int64_t highest = std::numeric_limits<std::int64_t>::max();
  float lowest_number = -std::numeric_limits<float>::infinity();
  float highest_number = std::numeric_limits<float>::infinity();
  // "none|gelu": of texts.
  std::string_view texts = {};
  // What to do about a node that has another.
  std::string_view advice = {};
};

constexpr AttributeRule integer(std::string_view name,
                                std::int64_t lowest = std::numeric_limits<std::int64_t>::min(),
                                std::int64_t highest = std::numeric_limits<std::int64_t>::max()) {
  return {.name = name, .lowest = lowest, .highest = highest};
}
constexpr AttributeRule required(AttributeRule rule) {
  rule.required = true;
  return rule;
}
constexpr AttributeRule advised(AttributeRule rule, std::string_view advice) {
  rule.advice = advice;
  return rule;
}
// 0 or 1.
constexpr AttributeRule flag(std::string_view name) { return integer(name, 0, 1); }
// An axis of a tensor, counted from the end if it is negative.
constexpr AttributeRule axis(std::string_view name) {
  return integer(name, -Shape::kMaxRank, Shape::kMaxRank);
}
// One that is taken with this value only.
constexpr AttributeRule only(std::string_view name, std::int64_t value) {
  return integer(name, value, value);
}
// A size or a number of things.
constexpr AttributeRule count(std::string_view name, std::int64_t lowest) {
  return integer(name, lowest, std::int64_t{1} << 31);
}
constexpr AttributeRule integers(std::string_view name,
                                 std::int64_t lowest = std::numeric_limits<std::int64_t>::min(),
                                 std::int64_t highest = std::numeric_limits<std::int64_t>::max()) {
  return {
      .name = name, .kind = AttributeRule::Kind::kIntegers, .lowest = lowest, .highest = highest};
}
constexpr AttributeRule number(std::string_view name,
                               float lowest = -std::numeric_limits<float>::infinity(),
                               float highest = std::numeric_limits<float>::infinity()) {
  return {.name = name,
          .kind = AttributeRule::Kind::kNumber,
          .lowest_number = lowest,
          .highest_number = highest};
}
// `texts`: "none|gelu".
constexpr AttributeRule text(std::string_view name, std::string_view texts) {
  return {.name = name, .kind = AttributeRule::Kind::kText, .texts = texts};
}

struct Contract {
  std::string_view domain;
  std::string_view op_type;
  // The versions of the schema that are taken: Node::since_version.
  int first_version = 1;
  int last_version = 1;
  std::span<const Port> inputs = {};
  std::span<const Port> outputs = {};
  std::span<const AttributeRule> attributes = {};

  bool has_shapes() const;
};

// Why the node is not within its operator's contract; empty if it is. What is known of shapes is
// compared as well.
std::string misfit(const Contract& contract, const Node& node);
// The same, with the node's name before it.
std::string violation(const Contract& contract, const Node& node);

// The same of a node of which no more is known than a model's file says: not the version of its
// operator's schema, and types and shapes of constants alone (a value whose type the file does not
// say is taken for float).
std::string violation_in_file(const Contract& contract, const Node& node);

// One of the two above.
using ContractCheck = std::string (*)(const Contract& contract, const Node& node);

// Why the node is none of its operator whatever is taken of it: an attribute that must be there is
// not, or is of another kind. Empty if it is one.
std::string damage(const Contract& contract, const Node& node);

// What the node has that the contract does not know of, an input, an output or an attribute, or an
// input that it must have and lacks, in words; empty if there is nothing.
std::string unknown_part(const Contract& contract, const Node& node);
// The same by the contract of the node's operator, if there is one.
std::string unknown_part(std::span<const Contract> contracts, const Node& node);

// Throws Error naming the node if the shapes do not fit the contract's; for each run. Allocates
// nothing.
void check_shapes(const Contract& contract, const std::string& name,
                  std::span<const Tensor> inputs);

}  // namespace flownpu
