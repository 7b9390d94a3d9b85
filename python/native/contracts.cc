// SPDX-License-Identifier: Apache-2.0
// Binds the contracts of the CPU device's operators (ops/nodes/contract.h): for Python code that
// reads graphs, for tests that compare them with the operators' schemas, and for the table in
// docs/operators.md.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "ops/device.h"
#include "ops/lowering/lowering.h"
#include "ops/nodes/contract.h"
#include "python/native/bindings.h"

namespace nb = nanobind;

using flownpu::AttributeRule;
using flownpu::Contract;
using flownpu::Port;

namespace {

template <typename Item>
std::vector<Item> listed(std::span<const Item> items) {
  return {items.begin(), items.end()};
}

std::vector<std::string> names_of_types(flownpu::Types types) {
  std::vector<std::string> names;
  for (int type = 0; type < flownpu::kDataTypes; ++type) {
    if (types.has(static_cast<flownpu::DataType>(type)))
      names.emplace_back(name_of(static_cast<flownpu::DataType>(type)));
  }
  return names;
}

std::string unknown_part_of(const std::string& domain, const std::string& op_type,
                            const std::vector<std::string>& inputs,
                            const std::vector<std::string>& outputs,
                            const std::vector<std::string>& attributes) {
  static const std::vector<Contract> contracts = flownpu::make_cpu_device({})->contracts();
  flownpu::Node node;
  node.op_type = op_type;
  node.domain = domain;
  for (const std::string& name : inputs) node.inputs.emplace_back().name = name;
  for (const std::string& name : outputs) node.outputs.emplace_back().name = name;
  for (const std::string& name : attributes) node.attributes.emplace(name, 0);
  return flownpu::unknown_part(contracts, node);
}

}  // namespace

namespace flownpu::native {

void bind_contracts(nb::module_& module) {
  nb::enum_<flownpu::Presence>(module, "Presence")
      .value("REQUIRED", flownpu::Presence::kRequired)
      .value("OPTIONAL", flownpu::Presence::kOptional)
      .value("VARIADIC", flownpu::Presence::kVariadic)
      .value("ATTRIBUTE", flownpu::Presence::kAttribute);
  nb::enum_<AttributeRule::Kind>(module, "Kind")
      .value("INTEGER", AttributeRule::Kind::kInteger)
      .value("NUMBER", AttributeRule::Kind::kNumber)
      .value("TEXT", AttributeRule::Kind::kText)
      .value("INTEGERS", AttributeRule::Kind::kIntegers);
  nb::class_<Port>(module, "Port")
      .def_prop_ro("name", [](const Port& port) { return std::string(port.name); })
      .def_prop_ro("types", [](const Port& port) { return names_of_types(port.types); })
      .def_ro("presence", &Port::presence)
      .def_prop_ro("shape", [](const Port& port) { return std::string(port.shape.text()); })
      .def_prop_ro("type_letter",
                   [](const Port& port) {
                     return port.type_letter == 0 ? std::string()
                                                  : std::string(1, port.type_letter);
                   })
      .def_ro("constant", &Port::constant)
      .def_prop_ro("meaning", [](const Port& port) { return std::string(port.meaning); });
  nb::class_<AttributeRule>(module, "AttributeRule")
      .def_prop_ro("name", [](const AttributeRule& rule) { return std::string(rule.name); })
      .def_ro("kind", &AttributeRule::kind)
      .def_ro("required", &AttributeRule::required)
      .def_ro("lowest", &AttributeRule::lowest)
      .def_ro("highest", &AttributeRule::highest)
      .def_ro("bounds_only", &AttributeRule::bounds_only)
      .def_ro("lowest_number", &AttributeRule::lowest_number)
      .def_ro("highest_number", &AttributeRule::highest_number)
      .def_prop_ro("texts", [](const AttributeRule& rule) { return std::string(rule.texts); })
      .def_prop_ro("default", [](const AttributeRule& rule) { return rule.fallback; })
      .def_prop_ro("meaning", [](const AttributeRule& rule) { return std::string(rule.meaning); });
  nb::class_<Contract>(module, "Contract")
      .def_prop_ro("domain", [](const Contract& contract) { return std::string(contract.domain); })
      .def_prop_ro("op_type",
                   [](const Contract& contract) { return std::string(contract.op_type); })
      .def_ro("first_version", &Contract::first_version)
      .def_ro("last_version", &Contract::last_version)
      .def_prop_ro("inputs", [](const Contract& contract) { return listed(contract.inputs); })
      .def_prop_ro("outputs", [](const Contract& contract) { return listed(contract.outputs); })
      .def_prop_ro("attributes",
                   [](const Contract& contract) { return listed(contract.attributes); });
  module.def("contracts", [] { return flownpu::make_cpu_device({})->contracts(); });
  module.def("unknown_part", unknown_part_of, nb::arg("domain"), nb::arg("op_type"),
             nb::arg("inputs"), nb::arg("outputs"), nb::arg("attributes"),
             "Which of a node's inputs, outputs and attributes its contract does not know, in "
             "words; empty if it knows all. Inputs and outputs are names, empty for absent ones.");
}

}  // namespace flownpu::native
