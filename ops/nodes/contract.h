// SPDX-License-Identifier: Apache-2.0
// Contract: the versions, inputs, outputs, attributes, element types and shapes of an operator that
// a device accepts. A node with anything else is not taken, and the reason names the misfit. The
// tables in docs/operators.md are generated from the contracts.
//
// The contract of FlowNPU's own operator is also its schema, with the meanings of its parts and the
// defaults of its attributes. It is the source of positions in C++, of the signatures of the ONNX
// functions (ops/definitions), of the functions on arrays (ops/eager.py) with their documentation,
// and of the fuzzers' defaults.
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
#include <variant>

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
inline constexpr Types kUInt8{DataType::kUInt8};
inline constexpr Types kBytes{DataType::kInt8, DataType::kUInt8};
inline constexpr Types kFloats{DataType::kFloat32, DataType::kFloat16, DataType::kBFloat16};
inline constexpr Types kNumbersAndFloats{DataType::kFloat32, DataType::kFloat16,
                                         DataType::kBFloat16, DataType::kInt64, DataType::kInt32};
// The types of a KV cache: rows of int8 contain their scale (ops/nodes/kv_cache.h).
inline constexpr Types kCacheTypes{DataType::kFloat32, DataType::kFloat16, DataType::kBFloat16,
                                   DataType::kInt8};
inline constexpr Types kAnyType{DataType::kFloat32, DataType::kFloat16, DataType::kBFloat16,
                                DataType::kInt64,   DataType::kInt32,   DataType::kInt8,
                                DataType::kUInt8,   DataType::kBool};

// A pattern for shapes: "[N,C,H,W]", "[..,K]" (any number of axes before the last), "[B,S,?]" (any
// length), "[B,1]", "" (any shape). A capital letter stands for the same length in all shapes of a
// contract.
class ShapePattern {
 public:
  constexpr ShapePattern() = default;
  // For constants only: a malformed pattern does not compile.
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
  // The number of axes that the pattern names, and whether more may come before them.
  constexpr int rank() const { return rank_; }
  constexpr bool open() const { return open_; }
  // The axis's length: a letter, a digit or '?'.
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
  // Any number of values of this kind; only for the last port of a list.
  kVariadic,
  // A tensor attribute, which Node::inputs lists after the inputs (Node::tensor_attributes).
  kAttribute,
};

// An input or an output.
struct Port {
  std::string_view name;
  Types types = kAnyType;
  Presence presence = Presence::kRequired;
  ShapePattern shape = {};
  // Ports with the same letter have the same type; 0: each port may have any of its `types`.
  char type_letter = 0;
  // Whether the value must be a constant of the model.
  bool constant = false;
  // The remedy for a node that does not fit: "export with float32 inputs".
  std::string_view advice = {};
  // The shape in the letters of the operator's description, and the meaning of the value. Only
  // schemas of FlowNPU's own operators have it.
  std::string_view meaning = {};
};

// The same port, which a node may leave out.
constexpr Port optional(Port port) {
  port.presence = Presence::kOptional;
  return port;
}
// The same port with another shape.
constexpr Port shaped(Port port, ShapePattern shape) {
  port.shape = shape;
  return port;
}

// The position of the port called `name`. For constants only: an unknown name does not compile.
consteval std::uint8_t position(std::span<const Port> ports, std::string_view name) {
  for (std::size_t i = 0; i < ports.size(); ++i) {
    if (ports[i].name == name) return static_cast<std::uint8_t>(i);
  }
  throw std::invalid_argument("expected the name of a port");
}

// An attribute and the values that are accepted for it.
struct AttributeRule {
  enum class Kind : std::uint8_t { kInteger, kNumber, kText, kIntegers };

  std::string_view name;
  Kind kind = Kind::kInteger;
  bool required = false;
  // Inclusive bounds of an integer, or of each integer in a list; then those of a number.
  std::int64_t lowest = std::numeric_limits<std::int64_t>::min();
  std::int64_t highest = std::numeric_limits<std::int64_t>::max();
  // Whether only the bounds themselves are accepted.
  bool bounds_only = false;
  float lowest_number = -std::numeric_limits<float>::infinity();
  float highest_number = std::numeric_limits<float>::infinity();
  // The values accepted for a text, as "none|gelu".
  std::string_view texts = {};
  // The remedy for a node that has another value.
  std::string_view advice = {};
  // The default of a missing attribute, and its meaning. Only schemas of FlowNPU's own operators
  // have them.
  std::variant<std::monostate, std::int64_t, float, std::string_view> fallback = {};
  std::string_view meaning = {};
};

// The fallback, of that type, of the attribute called `name`.
template <typename Value>
constexpr Value fallback_of(std::span<const AttributeRule> rules, std::string_view name) {
  for (const AttributeRule& rule : rules) {
    if (rule.name == name) return std::get<Value>(rule.fallback);
  }
  throw std::invalid_argument("expected the name of an attribute");
}

constexpr AttributeRule integer(std::string_view name,
                                std::int64_t lowest = std::numeric_limits<std::int64_t>::min(),
                                std::int64_t highest = std::numeric_limits<std::int64_t>::max()) {
  return {.name = name, .lowest = lowest, .highest = highest};
}
constexpr AttributeRule required(AttributeRule rule) {
  rule.required = true;
  return rule;
}
constexpr AttributeRule required(AttributeRule rule, std::string_view meaning) {
  rule.meaning = meaning;
  return required(rule);
}
// An optional attribute of a schema.
constexpr AttributeRule optional(
    AttributeRule rule,
    std::variant<std::monostate, std::int64_t, float, std::string_view> fallback,
    std::string_view meaning) {
  rule.fallback = fallback;
  rule.meaning = meaning;
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
// An integer that is accepted with this value only.
constexpr AttributeRule only(std::string_view name, std::int64_t value) {
  return integer(name, value, value);
}
// An integer that is accepted with these two values only; `low` is the smaller.
constexpr AttributeRule either(std::string_view name, std::int64_t low, std::int64_t high) {
  AttributeRule rule = integer(name, low, high);
  rule.bounds_only = true;
  return rule;
}
// A size or a count: an integer from `lowest` to 2^31.
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
  // The accepted versions of the operator's schema (Node::since_version).
  int first_version = 1;
  int last_version = 1;
  std::span<const Port> inputs = {};
  std::span<const Port> outputs = {};
  std::span<const AttributeRule> attributes = {};

  bool has_shapes() const;
};

// Why the node does not fit its operator's contract; empty if it does. Shapes are compared as far
// as they are known.
std::string misfit(const Contract& contract, const Node& node);
// The same, preceded by the node's operator and name.
std::string violation(const Contract& contract, const Node& node);

// The same for a node of which only the contents of a model's file are known. The version of the
// operator's schema is not checked; types and shapes are checked for constants only. The type float
// means that the file does not say the type.
std::string violation_in_file(const Contract& contract, const Node& node);

// violation() or violation_in_file().
using ContractCheck = std::string (*)(const Contract& contract, const Node& node);

// The reason why the node is invalid whatever values are accepted: a required attribute is missing,
// or an attribute is of the wrong kind. Empty if it is valid.
std::string damage(const Contract& contract, const Node& node);

// A message about an input, output or attribute of the node that the contract does not list, or
// about a required input that it lacks; empty if there is none.
std::string unknown_part(const Contract& contract, const Node& node);
// The same with the contract of the node's operator; empty if `contracts` has none.
std::string unknown_part(std::span<const Contract> contracts, const Node& node);

// Throws Error naming the node if the inputs' shapes do not fit the contract. Called in each run;
// allocates nothing.
void check_shapes(const Contract& contract, const std::string& name,
                  std::span<const Tensor> inputs);

}  // namespace flownpu
