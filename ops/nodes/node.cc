// SPDX-License-Identifier: Apache-2.0
#include "ops/nodes/node.h"

#include "ops/error.h"

namespace flownpu {
namespace {

template <typename T>
const T* find(const Node& node, std::string_view attribute, std::string_view expected) {
  const auto found = node.attributes.find(attribute);
  if (found == node.attributes.end()) return nullptr;
  if (const T* value = std::get_if<T>(&found->second)) return value;
  fail("[", node.op_type, "] expected attribute '", attribute, "' of node '", node.name, "' to be ",
       expected, ", got another type: export the model again");
}

}  // namespace

const Value* Node::input(std::size_t index) const {
  if (index >= inputs.size() || inputs[index].name.empty()) return nullptr;
  return &inputs[index];
}

bool Node::has_output(std::size_t index) const {
  return index < outputs.size() && !outputs[index].name.empty();
}

std::int64_t Node::integer(std::string_view attribute, std::int64_t otherwise) const {
  const auto* value = find<std::int64_t>(*this, attribute, "an integer");
  return value != nullptr ? *value : otherwise;
}

float Node::number(std::string_view attribute, float otherwise) const {
  const auto* value = find<float>(*this, attribute, "a float");
  return value != nullptr ? *value : otherwise;
}

std::string Node::text(std::string_view attribute, std::string_view otherwise) const {
  const auto* value = find<std::string>(*this, attribute, "a string");
  return value != nullptr ? *value : std::string(otherwise);
}

std::vector<std::int64_t> Node::integers(std::string_view attribute) const {
  const auto* value = find<std::vector<std::int64_t>>(*this, attribute, "a list of integers");
  return value != nullptr ? *value : std::vector<std::int64_t>{};
}

std::int64_t Node::required_integer(std::string_view attribute) const {
  if (const auto* value = find<std::int64_t>(*this, attribute, "an integer")) return *value;
  fail("[", op_type, "] expected node '", name, "' to have the attribute '", attribute,
       "', got none");
}

std::string to_string(const Node& node) { return node.op_type + " '" + node.name + "'"; }

}  // namespace flownpu
