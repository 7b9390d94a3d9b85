// SPDX-License-Identifier: Apache-2.0
// One node of a graph, as a device sees it: plain data, free of ONNX Runtime's types.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "ops/nodes/tensor.h"

namespace flownpu {

// The operators' own domain; "" is ONNX's, "com.microsoft" ORT's.
inline constexpr std::string_view kDomain = "ai.flownpu";

// ONNX's If, taken where both branches are constants: these are tensor attributes, as many of
// then_branch as the node has outputs, then as many of else_branch.
inline constexpr std::string_view kIf = "If";

// A value of the graph: a node's input or output.
struct Value {
  std::string name;
  DataType type = DataType::kFloat32;
  // Unknown dimensions are -1; without a value the rank itself is unknown.
  std::optional<Shape> shape;
  // The initializer's bytes, while the node is being prepared; null for a value that is computed or
  // fed. A step finds them among the inputs of each run, perhaps elsewhere: ORT maps external data
  // anew after the session is made.
  const void* constant = nullptr;
  // Keeps the constant's memory, where that is not the graph's: it then stays where it is.
  std::shared_ptr<const void> owner = nullptr;
};

using Attribute =
    std::variant<std::int64_t, float, std::string, std::vector<std::int64_t>, std::vector<float>>;

// A constant of a node that a device made for itself (Device::lower): no value of the graph, and in
// the order in which the device wants it. `write` puts it into memory of `bytes` bytes.
struct Packed {
  std::string name;
  std::size_t bytes = 0;
  std::function<void(std::span<std::byte>)> write;
};

struct Node {
  std::string name;
  std::string op_type;
  std::string domain;
  int since_version = 1;
  std::map<std::string, Attribute, std::less<>> attributes;
  // In the schema's order; an optional value that is absent has an empty name. Trailing absent ones
  // may be missing.
  std::vector<Value> inputs;
  std::vector<Value> outputs;
  // Names of the attributes that are tensors, which stand behind the other inputs: a step finds
  // them as it finds all constants.
  std::vector<std::string> tensor_attributes = {};
  // While the node is being prepared.
  std::vector<Packed> packed = {};

  // The input at `index`, or null if it is absent.
  const Value* input(std::size_t index) const;
  bool has_output(std::size_t index) const;

  // Attributes with a default; throw Error if the attribute has another type.
  std::int64_t integer(std::string_view attribute, std::int64_t otherwise) const;
  float number(std::string_view attribute, float otherwise) const;
  std::string text(std::string_view attribute, std::string_view otherwise) const;
  std::vector<std::int64_t> integers(std::string_view attribute) const;
  // Throws Error naming node and attribute if it is missing.
  std::int64_t required_integer(std::string_view attribute) const;
};

// "Q4NXMatMul 'layer.3.qkv'": how errors and placement reports call a node.
std::string to_string(const Node& node);

}  // namespace flownpu
