// SPDX-License-Identifier: Apache-2.0
#include "ops/nodes/contract.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <sstream>
#include <variant>

#include "ops/error.h"

namespace flownpu {
namespace {

// Joins pieces as fail() does.
template <typename... Pieces>
std::string words(const Pieces&... pieces) {
  std::ostringstream text;
  (text << ... << pieces);
  return text.str();
}

// Capital letters differ in the last five bits of their ASCII codes.
constexpr std::size_t kLetters = 32;
std::size_t place_of(char letter) { return static_cast<unsigned char>(letter) % kLetters; }

std::string advised(std::string_view advice) {
  return advice.empty() ? "" : "; " + std::string(advice);
}

// The lengths that letters stand for.
class Lengths {
 public:
  Lengths() { lengths_.fill(kUnknown); }

  // Whether the shape fits; the first length found for a letter is remembered. Dimensions of -1 fit
  // any length.
  bool fit(const ShapePattern& pattern, const Shape& shape) {
    if (pattern.any()) return true;
    if (pattern.open() ? shape.rank() < pattern.rank() : shape.rank() != pattern.rank())
      return false;
    const int skipped = shape.rank() - pattern.rank();
    for (int axis = 0; axis < pattern.rank(); ++axis) {
      if (!fit(pattern.axis(axis), shape[skipped + axis])) return false;
    }
    return true;
  }

  // The pattern with the lengths that are known by now in the place of their letters: "[B,S,8]".
  std::string text(const ShapePattern& pattern) const {
    std::string text = pattern.open() ? "[.." : "[";
    for (int axis = 0; axis < pattern.rank(); ++axis) {
      const char letter = pattern.axis(axis);
      const std::int64_t length = lengths_[place_of(letter)];
      text += text.size() > 1 ? "," : "";
      text += length == kUnknown ? std::string(1, letter) : std::to_string(length);
    }
    return text + "]";
  }

 private:
  static constexpr std::int64_t kUnknown = -1;

  bool fit(char letter, std::int64_t length) {
    if (letter == '?' || length < 0) return true;
    if (letter >= '0' && letter <= '9') return length == letter - '0';
    std::int64_t& known = lengths_[place_of(letter)];
    if (known == kUnknown) known = length;
    return known == length;
  }

  std::array<std::int64_t, kLetters> lengths_{};
};

// The port of the value at `index`: a variadic last port stands for all that follow. Null if there
// is none.
const Port* port_at(std::span<const Port> ports, std::size_t index) {
  if (index < ports.size()) return &ports[index];
  if (!ports.empty() && ports.back().presence == Presence::kVariadic) return &ports.back();
  return nullptr;
}

// Checks the inputs and the outputs of one node; `in_file`: as violation_in_file() does.
class PortChecker {
 public:
  explicit PortChecker(bool in_file) : in_file_(in_file) {}

  std::string check(std::string_view what, std::span<const Port> ports,
                    const std::vector<Value>& values) {
    for (std::size_t i = 0; i < std::max(ports.size(), values.size()); ++i) {
      const Value* value = i < values.size() && !values[i].name.empty() ? &values[i] : nullptr;
      const Port* port = port_at(ports, i);
      if (port == nullptr) {
        if (value == nullptr) continue;
        return words("expected ", ports.size(), " ", what, "s at most, got ", what, " ", i, " ('",
                     value->name, "')");
      }
      std::string reason = check(*port, value);
      if (!reason.empty())
        return words(what, " ", i, " (", port->name, "): ", reason, advised(port->advice));
    }
    return "";
  }

 private:
  std::string check(const Port& port, const Value* value) {
    if (value == nullptr) {
      const bool needed = port.presence == Presence::kRequired;
      return needed ? "expected " + to_string(port.types) + ", got none" : "";
    }
    if (port.types.none()) return "expected none";
    const bool shape_known = !in_file_ || value->constant != nullptr;
    const bool type_known = shape_known || value->type != DataType::kFloat32;
    if (type_known && !port.types.has(value->type))
      return words("expected ", to_string(port.types), ", got ", name_of(value->type));
    if (type_known && port.type_letter != 0) {
      std::optional<DataType>& type = types_[place_of(port.type_letter)];
      if (type && *type != value->type)
        return words("expected ", name_of(*type), ", the type of what it goes with, got ",
                     name_of(value->type));
      type = value->type;
    }
    if (port.constant && value->constant == nullptr)
      return words("expected a constant of the model, got '", value->name,
                   "', which is computed or fed");
    if (shape_known && value->shape && !lengths_.fit(port.shape, *value->shape))
      return words("expected shape ", lengths_.text(port.shape), ", got ",
                   to_string(*value->shape));
    return "";
  }

  bool in_file_;
  Lengths lengths_;
  std::array<std::optional<DataType>, kLetters> types_{};
};

std::string range_text(const AttributeRule& rule) {
  if (rule.kind == AttributeRule::Kind::kNumber) {
    return rule.lowest_number == rule.highest_number
               ? words(rule.lowest_number)
               : words(rule.lowest_number, " to ", rule.highest_number);
  }
  return rule.lowest == rule.highest
             ? words(rule.lowest)
             : words(rule.lowest, rule.bounds_only ? " or " : " to ", rule.highest);
}

std::string_view kind_text(AttributeRule::Kind kind) {
  constexpr std::string_view kKinds[] = {"an integer", "a number", "a text", "a list of integers"};
  return kKinds[static_cast<std::size_t>(kind)];
}

// The kinds of Attribute's alternatives, in their order; no kind corresponds to a list of floats.
constexpr AttributeRule::Kind kKindOf[] = {AttributeRule::Kind::kInteger,
                                           AttributeRule::Kind::kNumber, AttributeRule::Kind::kText,
                                           AttributeRule::Kind::kIntegers};

std::string missing_attribute(const Contract& contract, const Node& node) {
  for (const AttributeRule& rule : contract.attributes) {
    if (rule.required && !node.attributes.contains(rule.name))
      return words("expected the attribute '", rule.name, "', got none");
  }
  return "";
}

struct ValueText {
  std::string operator()(const std::string& value) const { return value; }
  std::string operator()(std::int64_t value) const { return std::to_string(value); }
  std::string operator()(float value) const { return words(value); }
  template <typename Item>
  std::string operator()(const std::vector<Item>& values) const {
    return words("a list of ", values.size());
  }
};

// Why the value is not accepted; empty if it is.
struct ValueChecker {
  const AttributeRule& rule;

  std::string operator()(std::int64_t value) const {
    if (rule.kind != AttributeRule::Kind::kInteger) return other("an integer");
    return within(value) ? "" : words("expected ", range_text(rule), ", got ", value);
  }
  std::string operator()(float value) const {
    if (rule.kind != AttributeRule::Kind::kNumber) return other("a number");
    const bool fits = value >= rule.lowest_number && value <= rule.highest_number;
    return fits ? "" : words("expected ", range_text(rule), ", got ", value);
  }
  std::string operator()(const std::string& value) const {
    if (rule.kind != AttributeRule::Kind::kText) return other("a text");
    for (std::string_view rest = rule.texts; !rest.empty();) {
      const std::size_t end = std::min(rest.find('|'), rest.size());
      if (rest.substr(0, end) == value) return "";
      rest.remove_prefix(std::min(end + 1, rest.size()));
    }
    return words("expected one of ", rule.texts, ", got '", value, "'");
  }
  std::string operator()(const std::vector<std::int64_t>& values) const {
    if (rule.kind != AttributeRule::Kind::kIntegers) return other("a list of integers");
    const auto bad = std::ranges::find_if_not(values, [this](auto value) { return within(value); });
    return bad == values.end() ? "" : words("expected ", range_text(rule), ", got ", *bad);
  }
  std::string operator()(const std::vector<float>& /*values*/) const {
    return other("a list of numbers");
  }

 private:
  bool within(std::int64_t value) const {
    if (rule.bounds_only) return value == rule.lowest || value == rule.highest;
    return value >= rule.lowest && value <= rule.highest;
  }
  std::string other(std::string_view got) const {
    return words("expected ", kind_text(rule.kind), ", got ", got);
  }
};

std::string attribute_violation(const Contract& contract, const Node& node) {
  for (const auto& [name, value] : node.attributes) {
    const auto rule = std::ranges::find(contract.attributes, name, &AttributeRule::name);
    if (rule == contract.attributes.end())
      return words("attribute '", name, "' is none that is known here");
    const std::string reason = std::visit(ValueChecker{*rule}, value);
    if (!reason.empty() && !rule->advice.empty())
      return words(name, "=", std::visit(ValueText(), value), ": ", rule->advice);
    if (!reason.empty()) return words("attribute '", name, "': ", reason);
  }
  if (std::string reason = missing_attribute(contract, node); !reason.empty()) return reason;
  for (const std::string& name : node.tensor_attributes) {
    const auto is_it = [&](const Port& port) {
      const bool may =
          port.presence == Presence::kAttribute || port.presence == Presence::kVariadic;
      return may && port.name == name;
    };
    if (std::ranges::none_of(contract.inputs, is_it))
      return words("attribute '", name, "' is none that is known here");
  }
  return "";
}

// Checks everything but the version.
std::string part_misfit(const Contract& contract, const Node& node, bool in_file) {
  PortChecker ports(in_file);
  if (std::string reason = ports.check("input", contract.inputs, node.inputs); !reason.empty())
    return reason;
  if (std::string reason = ports.check("output", contract.outputs, node.outputs); !reason.empty())
    return reason;
  return attribute_violation(contract, node);
}

std::string of_node(const Node& node, const std::string& reason) {
  return reason.empty() ? "" : words("[", to_string(node), "] ", reason);
}

}  // namespace

std::string to_string(Types types) {
  std::string text;
  for (int type = 0; type < kDataTypes; ++type) {
    if (types.has(static_cast<DataType>(type)))
      text.append(text.empty() ? "" : " or ").append(name_of(static_cast<DataType>(type)));
  }
  return text;
}

bool Contract::has_shapes() const {
  return std::ranges::any_of(inputs, [](const Port& port) { return !port.shape.any(); });
}

std::string misfit(const Contract& contract, const Node& node) {
  if (node.since_version < contract.first_version || node.since_version > contract.last_version) {
    return words("expected version ", contract.first_version, " to ", contract.last_version,
                 " of the operator, got ", node.since_version);
  }
  return part_misfit(contract, node, false);
}

std::string violation(const Contract& contract, const Node& node) {
  return of_node(node, misfit(contract, node));
}

std::string violation_in_file(const Contract& contract, const Node& node) {
  return of_node(node, part_misfit(contract, node, true));
}

namespace {

template <typename Named>
std::string names_of(std::span<const Named> named) {
  std::string names;
  for (const Named& one : named) names.append(names.empty() ? "" : ", ").append(one.name);
  return names;
}

}  // namespace

std::string damage(const Contract& contract, const Node& node) {
  for (const AttributeRule& rule : contract.attributes) {
    const auto found = node.attributes.find(rule.name);
    if (found == node.attributes.end()) continue;
    const std::size_t kind = found->second.index();
    if (kind >= std::size(kKindOf) || kKindOf[kind] != rule.kind)
      return words("attribute '", rule.name, "': expected ", kind_text(rule.kind));
  }
  return missing_attribute(contract, node);
}

std::string unknown_part(const Contract& contract, const Node& node) {
  const auto more = [&](std::string_view what, std::span<const Port> ports,
                        const std::vector<Value>& values) -> std::string {
    for (std::size_t i = ports.size(); i < values.size(); ++i) {
      if (values[i].name.empty() || port_at(ports, i) != nullptr) continue;
      return words(what, " ", values[i].name, " is not known: ", node.op_type, " is known with ",
                   names_of(ports));
    }
    return "";
  };
  for (std::size_t i = 0; i < contract.inputs.size(); ++i) {
    const Port& port = contract.inputs[i];
    if (port.presence == Presence::kRequired && node.input(i) == nullptr)
      return words("expected the input ", port.name, ", got none");
  }
  if (std::string part = more("input", contract.inputs, node.inputs); !part.empty()) return part;
  if (std::string part = more("output", contract.outputs, node.outputs); !part.empty()) return part;
  for (const auto& [name, value] : node.attributes) {
    const auto is_tensor = [&](const Port& port) {
      return port.presence == Presence::kAttribute && port.name == name;
    };
    if (std::ranges::find(contract.attributes, name, &AttributeRule::name) !=
            contract.attributes.end() ||
        std::ranges::any_of(contract.inputs, is_tensor))
      continue;
    return words("attribute ", name, " is not known: ", node.op_type, " is known with ",
                 names_of(contract.attributes));
  }
  return "";
}

std::string unknown_part(std::span<const Contract> contracts, const Node& node) {
  const auto contract = std::ranges::find_if(contracts, [&](const Contract& candidate) {
    return candidate.op_type == node.op_type && candidate.domain == node.domain;
  });
  return contract == contracts.end() ? "" : unknown_part(*contract, node);
}

void check_shapes(const Contract& contract, const std::string& name,
                  std::span<const Tensor> inputs) {
  Lengths lengths;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const Port* port = port_at(contract.inputs, i);
    if (port == nullptr || !inputs[i].present() || lengths.fit(port->shape, inputs[i].shape))
      continue;
    fail("[", name, "] expected input ", i, " (", port->name, ") of shape ",
         lengths.text(port->shape), ", got ", to_string(inputs[i].shape));
  }
}

}  // namespace flownpu
