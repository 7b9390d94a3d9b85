// SPDX-License-Identifier: Apache-2.0
// The fields of the structs that describe a model's layers, each listed once:
//
//   template <typename Visit> static void fields(Visit&& visit) {
//     visit(field("heads", &Attention::heads, "query heads H", 1, kMostHeads));
//
// From that list come the attributes of nodes (below), the classes of flownpu._native with their
// documentation (python/native/description.h), and equality where fields are compared one by one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "ops/nodes/node.h"

namespace flownpu::transformer {

// A field of type std::int64_t (of values `lowest` to `highest`), float, bool, or an enumeration
// with texts().
template <typename Struct, typename Type>
struct Field {
  std::string_view name;
  Type Struct::* member;
  const char* meaning;
  std::int64_t lowest;
  std::int64_t highest;
};

template <typename Struct, typename Type>
constexpr Field<Struct, Type> field(std::string_view name, Type Struct::* member,
                                    const char* meaning, std::int64_t lowest = 0,
                                    std::int64_t highest = 1) {
  return {name, member, meaning, lowest, highest};
}

// The value of an attribute for item `index` of `count`. The attribute is one value for all items,
// or a list with one for each. Throws Error if it is missing, has another type or number of items,
// or is outside `lowest` to `highest` or `texts`.
std::int64_t integer_at(const Node& node, const std::string& attribute, std::size_t index,
                        std::size_t count, std::int64_t lowest, std::int64_t highest);
float number_at(const Node& node, const std::string& attribute, std::size_t index,
                std::size_t count);
std::size_t text_at(const Node& node, const std::string& attribute, std::size_t index,
                    std::size_t count, std::span<const std::string_view> texts);

// Throws Error unless the node's inputs (or outputs) are as many as `types`, all present, and each
// of one of the types listed for it. `what`: "input" or "output".
void check_values(const Node& node, const char* what, const std::vector<Value>& values,
                  const std::vector<std::vector<DataType>>& types);

template <typename Type>
Attribute attribute_of(const Type& value) {
  if constexpr (std::is_enum_v<Type>)
    return std::string(texts(value)[static_cast<std::size_t>(value)]);
  else if constexpr (std::is_same_v<Type, float>)
    return value;
  else
    return static_cast<std::int64_t>(value);
}

// Sets an attribute of the node, `prefix` and its name, for each field: its value if all items have
// the same, else the list of their values.
template <typename Struct>
void write_fields(Node& node, std::string_view prefix, const std::vector<Struct>& items) {
  Struct::fields([&](const auto& field) {
    const auto same = [&](const Struct& item) {
      return item.*field.member == items.front().*field.member;
    };
    Attribute& attribute = node.attributes[std::string(prefix).append(field.name)];
    if (std::ranges::all_of(items, same)) {
      attribute = attribute_of(items.front().*field.member);
      return;
    }
    using Type = std::remove_cvref_t<decltype(items.front().*field.member)>;
    std::vector<std::conditional_t<std::is_same_v<Type, float>, float, std::int64_t>> values;
    values.reserve(items.size());
    for (const Struct& item : items)
      values.push_back(static_cast<typename decltype(values)::value_type>(item.*field.member));
    attribute = std::move(values);
  });
}

// Reads what write_fields() wrote. Throws Error as integer_at() does.
template <typename Struct>
std::vector<Struct> read_fields(const Node& node, std::string_view prefix, std::size_t count) {
  std::vector<Struct> items(count);
  Struct::fields([&](const auto& field) {
    const std::string name = std::string(prefix).append(field.name);
    for (std::size_t i = 0; i < count; ++i) {
      auto& value = items[i].*field.member;
      using Type = std::remove_cvref_t<decltype(value)>;
      if constexpr (std::is_enum_v<Type>)
        value = static_cast<Type>(text_at(node, name, i, count, texts(value)));
      else if constexpr (std::is_same_v<Type, float>)
        value = number_at(node, name, i, count);
      else
        value = static_cast<Type>(integer_at(node, name, i, count, field.lowest, field.highest));
    }
  });
  return items;
}

// The first field, but those in `own`, in which a layer differs from the layers before, as a
// message; empty if there is none.
template <typename Struct>
std::string difference(const Struct& found, const Struct& before,
                       std::span<const std::string_view> own = {}) {
  std::ostringstream text;
  const auto write = [&](const auto& value) {
    if constexpr (std::is_enum_v<std::remove_cvref_t<decltype(value)>>)
      text << texts(value)[static_cast<std::size_t>(value)];
    else
      text << value;
  };
  Struct::fields([&](const auto& field) {
    const auto& mine = found.*field.member;
    const auto& theirs = before.*field.member;
    if (mine == theirs || text.tellp() != 0 || std::ranges::find(own, field.name) != own.end())
      return;
    text << "expected " << field.name << " = ";
    write(theirs);
    text << " as in the layers before, got ";
    write(mine);
  });
  return text.str();
}

}  // namespace flownpu::transformer
