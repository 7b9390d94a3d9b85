// SPDX-License-Identifier: Apache-2.0
#include "ops/transformer/graph/fields.h"

#include <algorithm>
#include <variant>

#include "ops/error.h"

namespace flownpu::transformer {
namespace {

// The item's value, if the attribute is a Type or a list of them; null if it is neither.
template <typename Type>
const Type* value_at(const Node& node, const std::string& name, std::size_t index,
                     std::size_t count) {
  const auto found = node.attributes.find(name);
  if (found == node.attributes.end())
    fail("[", to_string(node), "] expected the attribute ", name, ", there is none: compile again");
  if (const auto* value = std::get_if<Type>(&found->second)) return value;
  if constexpr (!std::is_same_v<Type, std::string>) {
    if (const auto* list = std::get_if<std::vector<Type>>(&found->second)) {
      if (list->size() != count)
        fail("[", to_string(node), "] expected ", name, " of ", count, " layers, got ",
             list->size());
      return &(*list)[index];
    }
  }
  return nullptr;
}

[[noreturn]] void refuse_type(const Node& node, const std::string& name, const char* expected) {
  fail("[", to_string(node), "] expected ", name, " to be ", expected);
}

}  // namespace

std::int64_t integer_at(const Node& node, const std::string& attribute, std::size_t index,
                        std::size_t count, std::int64_t lowest, std::int64_t highest) {
  const auto* value = value_at<std::int64_t>(node, attribute, index, count);
  if (value == nullptr) refuse_type(node, attribute, "integers");
  if (*value < lowest || *value > highest)
    fail("[", to_string(node), "] expected ", attribute, " of ", lowest, " to ", highest, ", got ",
         *value);
  return *value;
}

float number_at(const Node& node, const std::string& attribute, std::size_t index,
                std::size_t count) {
  const auto* value = value_at<float>(node, attribute, index, count);
  if (value == nullptr) {  // Python's 0 for 0.0
    const auto* whole = value_at<std::int64_t>(node, attribute, index, count);
    if (whole != nullptr) return static_cast<float>(*whole);
  }
  if (value == nullptr) refuse_type(node, attribute, "floats");
  return *value;
}

std::size_t text_at(const Node& node, const std::string& attribute, std::size_t index,
                    std::size_t count, std::span<const std::string_view> texts) {
  const auto* text = value_at<std::string>(node, attribute, index, count);
  if (text == nullptr)
    return static_cast<std::size_t>(
        integer_at(node, attribute, index, count, 0, static_cast<std::int64_t>(texts.size()) - 1));
  const auto found = std::ranges::find(texts, *text);
  if (found == texts.end())
    fail("[", to_string(node), "] expected ", attribute, " of one of ", texts.size(),
         " kinds, the first ", texts.front(), "; got ", *text);
  return static_cast<std::size_t>(found - texts.begin());
}

void check_values(const Node& node, const char* what, const std::vector<Value>& values,
                  const std::vector<std::vector<DataType>>& types) {
  if (values.size() != types.size())
    fail("[", to_string(node), "] expected ", types.size(), " ", what, "s, got ", values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (values[i].name.empty() || std::ranges::find(types[i], values[i].type) == types[i].end())
      fail("[", to_string(node), "] expected ", what, " ", i, " to be ", name_of(types[i].front()),
           ", got ", values[i].name.empty() ? "none" : name_of(values[i].type));
  }
}

}  // namespace flownpu::transformer
