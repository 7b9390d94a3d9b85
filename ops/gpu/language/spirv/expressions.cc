// SPDX-License-Identifier: Apache-2.0
// Expressions, by precedence. Both sides of && and || are computed, so the right one must have no
// effect; of ?: only the chosen one is, if one of them reads memory.
#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "ops/error.h"
#include "ops/gpu/language/spirv/compiler.h"

namespace flownpu::gpu::spirv {
namespace {

// Binary signs, those that bind least first.
const std::vector<std::vector<std::string_view>>& sign_levels() {
  static const std::vector<std::vector<std::string_view>> kLevels{
      {"||"},       {"&&"},     {"|"},          {"^"}, {"&"}, {"==", "!="}, {"<", ">", "<=", ">="},
      {"<<", ">>"}, {"+", "-"}, {"*", "/", "%"}};
  return kLevels;
}

constexpr std::pair<std::string_view, Scalar> kTypes[] = {
    {"float", Scalar::kFloat},      {"int", Scalar::kInt},
    {"uint", Scalar::kUint},        {"ushort", Scalar::kUint},
    {"char", Scalar::kChar},        {"uchar", Scalar::kUchar},
    {"left_matrix", Scalar::kLeft}, {"right_matrix", Scalar::kRight},
    {"sum_matrix", Scalar::kSum}};

// The number behind a type's name: 1 if there is none, 0 if something else is there.
int width_behind(std::string_view text) {
  if (text.empty()) return 1;
  for (const auto& [digits, width] : {std::pair("2", 2), {"4", 4}, {"8", 8}, {"16", 16}})
    if (text == digits) return width;
  return 0;
}

// The places of components that a name of several means.
std::vector<std::size_t> places_of(const std::string& name, std::size_t width) {
  std::vector<std::size_t> places;
  const bool is_even = name == "even";
  if (name == "lo" || name == "hi") {
    for (std::size_t i = 0; i < width / 2; ++i) places.push_back(name == "lo" ? i : width / 2 + i);
  } else if (is_even || name == "odd") {
    for (std::size_t i = is_even ? 0 : 1; i < width; i += 2) places.push_back(i);
  } else {
    const bool by_number = name[0] == 's';
    const std::string_view letters = by_number ? "0123456789abcdef" : "xyzw";
    for (const char one : name.substr(by_number ? 1 : 0)) places.push_back(letters.find(one));
  }
  for (const std::size_t place : places)
    if (place >= width) fail("expected components of a vector of ", width, ", got .", name);
  return places;
}

}  // namespace

bool is_type(std::string_view name) {
  return std::ranges::any_of(kTypes, [&](const auto& one) {
    return name.starts_with(one.first) && width_behind(name.substr(one.first.size())) != 0;
  });
}

Type type_of(std::string_view name) {
  for (const auto& [text, scalar] : kTypes) {
    if (!name.starts_with(text)) continue;
    if (const int width = width_behind(name.substr(text.size())); width != 0)
      return {scalar, width};
  }
  fail("expected a type, got '", name, "'");
}

Value Compiler::value_of(const Named& named) {
  if (const auto* value = std::get_if<Value>(&named)) return *value;
  return arithmetic_.load(std::get<Place>(named));
}

Value Compiler::expression() {
  Value value = binary(0);
  return take("?") ? choice(value) : value;
}

// Each side is emitted by itself, then put behind what was there: into blocks of their own, or, if
// neither has an effect, one behind the other with a choice between their values.
Value Compiler::choice(const Value& condition) {
  const Id chosen = condition.constant ? 0 : arithmetic_.condition(condition);
  const Id labels[]{module_.next(), module_.next()};
  const Id block = block_;
  const Words before = module_.taken();
  const std::int64_t effects = effects_;
  Value values[2];
  Words sides[2];
  Id ends[2];
  for (int side = 0; side < 2; ++side) {
    if (side == 1) expect(":");
    block_ = condition.constant ? block : labels[side];
    values[side] = expression();
    ends[side] = block_;
    sides[side] = module_.taken();
  }
  if (condition.constant) {
    const int side = *condition.constant != 0 ? 0 : 1;
    module_.put(before);
    module_.append(sides[side]);
    block_ = ends[side];
    return values[side];
  }
  Value matched[2];
  for (int side = 0; side < 2; ++side) {  // each conversion behind its own side
    module_.put(std::move(sides[side]));
    matched[side] =
        arithmetic_.converted(values[side], arithmetic_.common(values[0].type, values[1].type));
    sides[side] = module_.taken();
  }
  module_.put(before);
  if (effects_ == effects) {
    module_.append(sides[0]);
    module_.append(sides[1]);
    block_ = block;
    return arithmetic_.selected(chosen, matched[0], matched[1]);
  }
  const Id merge = module_.next();
  module_.emit(Op::kSelectionMerge, {merge, 0});
  module_.emit(Op::kBranchConditional, {chosen, labels[0], labels[1]});
  for (int side = 0; side < 2; ++side) {
    module_.emit(Op::kLabel, {labels[side]});
    module_.append(sides[side]);
    branch(merge);
  }
  begin_block(merge);
  Value made{matched[0].type};
  for (std::size_t i = 0; i < matched[0].components.size(); ++i)
    made.components.push_back({module_.emit(
        Op::kPhi, arithmetic_.id_of(made.type),
        {matched[0].components[i].id, ends[0], matched[1].components[i].id, ends[1]})});
  return made;
}

Value Compiler::binary(std::size_t level) {
  if (level == sign_levels().size()) return unary();
  Value left = binary(level + 1);
  while (std::ranges::find(sign_levels()[level], token().text) != sign_levels()[level].end() &&
         token().kind == Token::Kind::kSign) {
    const std::string sign = tokens_[at_++].text;
    const bool is_logical = sign == "&&" || sign == "||";
    const std::int64_t effects = effects_;
    const Value right = binary(level + 1);
    if (!is_logical) {
      left = arithmetic_.binary(sign, left, right);
      continue;
    }
    if (effects_ != effects) fail("expected no read of a tensor on the right of ", sign);
    const Id first = arithmetic_.condition(left);
    const Id second = arithmetic_.condition(right);
    left = {{Scalar::kBool},
            {{module_.emit(sign == "&&" ? Op::kLogicalAnd : Op::kLogicalOr, module_.of_bool(),
                           {first, second})}}};
  }
  return left;
}

Value Compiler::unary() {
  if (take("-")) return arithmetic_.negated(unary());
  if (take("+")) return unary();
  if (take("~")) return arithmetic_.inverted(unary());
  if (take("!")) return arithmetic_.denied(unary());
  if (is("(") && is_type(tokens_[at_ + 1].text) && tokens_[at_ + 2].text == ")") {
    ++at_;
    const Type to = type();
    ++at_;
    return cast(to);
  }
  return value_of(postfix());
}

// A cast to a vector takes all components in parentheses, or one value for all.
Value Compiler::cast(Type to) {
  if (to.width == 1 || !is("(")) return arithmetic_.converted(unary(), to);
  const std::vector<Value> given = arguments();
  if (given.size() == 1) return arithmetic_.converted(given[0], to);
  Value made{to};
  for (const Value& part : given) {
    const Value own = arithmetic_.converted(part, {to.scalar, part.type.width});
    made.components.insert(made.components.end(), own.components.begin(), own.components.end());
  }
  if (made.components.size() != static_cast<std::size_t>(to.width))
    fail("expected ", to.width, " components of a vector, got ", made.components.size());
  return made;
}

std::vector<Value> Compiler::arguments() {
  std::vector<Value> given;
  expect("(");
  while (!take(")")) {
    given.push_back(expression());
    if (!is(")")) expect(",");
  }
  return given;
}

Compiler::Named Compiler::postfix() {
  Named named = primary();
  while (is("[") || is(".")) {
    if (take(".")) {
      named = component_of(named, name());
      continue;
    }
    expect("[");
    const Value index = expression();
    expect("]");
    if (!std::holds_alternative<Place>(named)) fail("expected an array before '['");
    named = arithmetic_.at(std::get<Place>(named), index);
  }
  return named;
}

Compiler::Named Compiler::component_of(const Named& named, const std::string& components) {
  const Value all = value_of(named);
  Value made{{all.type.scalar, 0}};
  for (const std::size_t place : places_of(components, all.components.size()))
    made.components.push_back(all.components[place]);
  made.type.width = static_cast<int>(made.components.size());
  return made;
}

// `(shared float*)name`: the same memory as elements of another type.
Place Compiler::shared_cast() {
  expect("(");
  expect("shared");
  const Type of = type();
  expect("*");
  expect(")");
  const Symbol& symbol = find(name());
  if (!std::holds_alternative<Place>(symbol)) fail("expected shared memory behind (shared ...*)");
  Place place = std::get<Place>(symbol);
  place.type = of;
  place.sizes = {0};  // any index
  return place;
}

Compiler::Named Compiler::primary() {
  if (is("(") && tokens_[at_ + 1].text == "shared") return shared_cast();
  if (take("(")) {
    Named inner =
        is("(") && tokens_[at_ + 1].text == "shared" ? Named(shared_cast()) : Named(expression());
    expect(")");
    return inner;
  }
  if (token().kind != Token::Kind::kName) return number();
  const std::string named = name();
  if (is("(")) return call(named);
  if (named == "INFINITY") return arithmetic_.real(std::numeric_limits<float>::infinity());
  if (named == "NAN") return arithmetic_.real(std::numeric_limits<float>::quiet_NaN());
  const Symbol& symbol = find(named);
  if (const auto* value = std::get_if<Value>(&symbol)) return *value;
  if (const auto* place = std::get_if<Place>(&symbol)) return *place;
  fail("expected a variable, got '", named, "'");
}

Value Compiler::number() {
  const Token& one = tokens_[at_++];
  if (one.kind == Token::Kind::kFloat) return arithmetic_.real(one.number);
  if (one.kind == Token::Kind::kInteger) return arithmetic_.integer(one.integer);
  if (one.kind == Token::Kind::kUnsigned) return arithmetic_.integer(one.integer, Scalar::kUint);
  --at_;
  fail("expected a value, got '", one.text, "'");
}

}  // namespace flownpu::gpu::spirv
