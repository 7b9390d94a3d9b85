// SPDX-License-Identifier: Apache-2.0
// A graph's nodes, as tests give them to a device.
#pragma once

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ops/nodes/node.h"
#include "python/native/arrays.h"

namespace flownpu::tests {

using Attributes = std::map<std::string, Attribute>;
// name, type, shape or none if it is not known, contents of an initializer
using GivenValue = std::tuple<std::string, std::string, std::optional<std::vector<std::int64_t>>,
                              std::optional<native::Array>>;
// name, operator, domain, attributes, inputs, outputs
using GivenNode = std::tuple<std::string, std::string, std::string, Attributes,
                             std::vector<GivenValue>, std::vector<GivenValue>>;

inline std::vector<Value> values_of(const std::vector<GivenValue>& given) {
  std::vector<Value> values;
  for (const auto& [name, type, shape, contents] : given) {
    Value& value = values.emplace_back();
    value.name = name;
    if (!type.empty()) value.type = native::type_of(type);
    if (shape) value.shape = Shape(shape->data(), shape->size());
    if (contents) value.constant = contents->data();
  }
  return values;
}

// Nodes, and what keeps their initializers.
struct Partition {
  std::vector<GivenNode> given;
  std::vector<Node> nodes;

  explicit Partition(std::vector<GivenNode> from) : given(std::move(from)) {
    for (const auto& [name, op_type, domain, attributes, inputs, outputs] : given) {
      Node& node = nodes.emplace_back();
      node.name = name;
      node.op_type = op_type;
      node.domain = domain;
      node.attributes.insert(attributes.begin(), attributes.end());
      node.inputs = values_of(inputs);
      node.outputs = values_of(outputs);
    }
  }
};

}  // namespace flownpu::tests
