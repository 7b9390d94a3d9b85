// SPDX-License-Identifier: Apache-2.0
// Binds a struct that lists its fields (ops/transformer/graph/fields.h): a class whose instances do
// not change, with a keyword of its constructor and a documented property for each field.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/operators.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <type_traits>
#include <vector>

#include "ops/error.h"
#include "ops/transformer/graph/fields.h"

namespace flownpu::native {

// The struct with these fields, and its defaults for others. Throws Error for an unknown name, and
// for a value that an attribute may not have.
template <typename Struct>
Struct from_keywords(const nanobind::kwargs& given) {
  Node node;
  node.op_type = Struct::kName;
  transformer::write_fields(node, "", std::vector{Struct()});
  for (const auto& [key, value] : given) {
    const auto name = nanobind::cast<std::string>(key);
    const auto found = node.attributes.find(name);
    if (found == node.attributes.end())
      fail("[", Struct::kName, "] expected the name of a field, got ", name);
    if (!nanobind::try_cast(value, found->second))
      fail("[", Struct::kName, "] expected a number or a text as ", name);
  }
  return transformer::read_fields<Struct>(node, "", 1).front();
}

template <typename Struct>
nanobind::dict as_dict(const Struct& value) {
  Node node;
  transformer::write_fields(node, "", std::vector{value});
  nanobind::dict fields;
  for (const auto& [name, attribute] : node.attributes)
    fields[name.c_str()] = nanobind::cast(attribute);
  return fields;
}

// `as_dict`: all values of an instance. The caller binds the constructor.
template <typename Struct, typename AsDict>
nanobind::class_<Struct> bind_fields(nanobind::module_& module, const char* name, const char* text,
                                     const AsDict& as_dict) {
  nanobind::class_<Struct> bound(module, name, text);
  Struct::fields([&](const auto& field) {
    const auto get = [member = field.member](const Struct& value) {
      if constexpr (std::is_enum_v<std::remove_cvref_t<decltype(value.*member)>>)
        return std::string(texts(value.*member)[static_cast<std::size_t>(value.*member)]);
      else
        return value.*member;
    };
    bound.def_prop_ro(field.name.data(), get, field.meaning);
  });
  const auto text_of = [as_dict](const Struct& value) { return nanobind::repr(as_dict(value)); };
  bound
      .def(nanobind::self == nanobind::self,
           nanobind::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__hash__", [text_of](const Struct& value) { return nanobind::hash(text_of(value)); })
      .def("__repr__",
           [text_of, name](const Struct& value) {
             return nanobind::str(nanobind::str(name) + text_of(value));
           })
      .def("as_dict", as_dict, "All fields, by name.");
  return bound;
}

// The same with a constructor, for structs without other members.
template <typename Struct>
nanobind::class_<Struct> bind_fields(nanobind::module_& module, const char* name,
                                     const char* text) {
  return bind_fields<Struct>(module, name, text, as_dict<Struct>)
      .def(
          "__init__",
          [](Struct* self, const nanobind::kwargs& fields) {
            new (self) Struct(from_keywords<Struct>(fields));
          },
          nanobind::sig("def __init__(self, **fields: int | float | str) -> None"));
}

}  // namespace flownpu::native
