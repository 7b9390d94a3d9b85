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

// The domain of FlowNPU's operators; ONNX's own is "", ONNX Runtime's (ORT's) "com.microsoft".
inline constexpr std::string_view kDomain = "ai.flownpu";

// ONNX's If, which is supported where both branches only return constants. The constants become
// tensor attributes: one for each output in then_branch, then one for each in else_branch.
inline constexpr std::string_view kIf = "If";

// A value of the graph: a node's input or output.
struct Value {
  std::string name;
  DataType type = DataType::kFloat32;
  // Unknown dimensions are -1; without a value the rank itself is unknown.
  std::optional<Shape> shape;
  // The initializer's bytes, valid while the node is being prepared; null for a value that is
  // computed or fed. In a run the constant is one of the step's inputs, possibly at another
  // address, because ORT maps external data again after the session is made.
  const void* constant = nullptr;
  // Owns the constant's memory if the graph does not; the constant's address then never changes.
  std::shared_ptr<const void> owner = nullptr;

  // The size of a constant in bytes; 0 for an unknown shape.
  std::size_t bytes() const { return shape ? bytes_of(type, *shape) : 0; }
};

using Attribute =
    std::variant<std::int64_t, float, std::string, std::vector<std::int64_t>, std::vector<float>>;

// A constant that a device makes for its own node (Device::lower). It is no value of the graph, but
// data in the device's layout. `write` writes its `bytes` bytes to the given memory.
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
  // In the schema's order; an absent optional value has an empty name. Absent values at the end may
  // be left out.
  std::vector<Value> inputs;
  std::vector<Value> outputs;
  // Names of the attributes that are tensors. Their values are appended to `inputs`, so that a step
  // gets them like any other constant.
  std::vector<std::string> tensor_attributes = {};
  // Valid while the node is being prepared.
  std::vector<Packed> packed = {};

  // The input at `index`, or null if it is absent.
  const Value* input(std::size_t index) const;
  bool has_output(std::size_t index) const;

  // The attribute, or `otherwise` (or an empty list) if it is missing. The functions throw Error if
  // it has another type.
  std::int64_t integer(std::string_view attribute, std::int64_t otherwise) const;
  float number(std::string_view attribute, float otherwise) const;
  std::string text(std::string_view attribute, std::string_view otherwise) const;
  std::vector<std::int64_t> integers(std::string_view attribute) const;
  // Throws Error naming node and attribute if it is missing or has another type.
  std::int64_t required_integer(std::string_view attribute) const;
};

// "Q4NXMatMul 'layer.3.qkv'": how errors and placement reports call a node.
std::string to_string(const Node& node);

}  // namespace flownpu
