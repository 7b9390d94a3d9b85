// SPDX-License-Identifier: Apache-2.0
// Statements: declarations, assignments, if and for, as SPIR-V's structured control flow.
#include <algorithm>
#include <iterator>
#include <utility>

#include "ops/error.h"
#include "ops/gpu/language/spirv/compiler.h"

namespace flownpu::gpu::spirv {
namespace {

constexpr std::uint32_t kWorkgroupId = 26;
constexpr std::uint32_t kLocalInvocationIndex = 29;
constexpr std::uint32_t kUnroll = 1;  // of a loop's control
constexpr std::size_t kShownTokens = 8;

}  // namespace

Compiler::Compiler(const std::vector<std::string>& tensors,
                   const std::vector<std::string>& parameters, std::optional<MatrixUnits> matrices)
    : module_(matrices), memory_(module_, arithmetic_, tensors.size(), parameters.size()) {
  scopes_.emplace_back();
  std::uint32_t number = 0;
  for (const std::string& tensor : tensors) declare(tensor, TensorName{number++});
  number = 0;
  for (const std::string& parameter : parameters) declare(parameter, memory_.parameter(number++));
  const Id uint = module_.of_uint();
  const Id three = module_.vector_of(uint, 3);
  group_ = module_.first(Op::kLoad, three, {module_.builtin(kWorkgroupId, three)});
  lane_ = module_.first(Op::kLoad, uint, {module_.builtin(kLocalInvocationIndex, uint)});
  lane_ = module_.first(Op::kBitcast, module_.of_int(), {lane_});
}

void Compiler::compile(std::string_view functions, std::string_view body) {
  tokens_ = tokens_of(functions);
  tokens_.pop_back();
  const std::size_t begin = tokens_.size();
  std::ranges::move(tokens_of(body), std::back_inserter(tokens_));
  try {
    while (at_ < begin) declare_functions();
    scopes_.emplace_back();
    while (token().kind != Token::Kind::kEnd) statement();
  } catch (const Error& error) {
    std::string place;
    for (std::size_t i = at_; i < std::min(at_ + kShownTokens, tokens_.size()); ++i)
      place += " " + tokens_[i].text;
    fail(error.what(), ", before '", place, " ...'");
  }
}

bool Compiler::take(std::string_view text) {
  if (!is(text)) return false;
  ++at_;
  return true;
}

void Compiler::expect(std::string_view text) {
  if (!take(text)) fail("expected '", text, "', got '", token().text, "'");
}

std::string Compiler::name() {
  if (token().kind != Token::Kind::kName) fail("expected a name, got '", token().text, "'");
  return tokens_[at_++].text;
}

// From behind an opening brace or parenthesis to behind the one that closes it.
void Compiler::skip_to_closing() {
  for (int depth = 1; depth > 0; ++at_) {
    if (token().kind == Token::Kind::kEnd) fail("expected ')' or '}'");
    if (is("(") || is("{")) ++depth;
    if (is(")") || is("}")) --depth;
  }
}

bool Compiler::begins_type() const { return is("const") || is("shared") || is_type(token().text); }

Type Compiler::type() { return type_of(name()); }

Compiler::Symbol& Compiler::find(const std::string& name) {
  for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope)
    if (const auto found = scope->find(name); found != scope->end()) return found->second;
  fail("expected a name that is declared, got '", name, "'");
}

void Compiler::declare_functions() {
  Declared function{.type = type()};
  const std::string declared = name();
  expect("(");
  while (!take(")")) {
    const Type of = type();
    function.parameters.emplace_back(of, name());
    take(",");
  }
  expect("{");
  function.body = at_;
  skip_to_closing();
  declare(declared, function);
}

void Compiler::statement() {
  if (is("{")) return block();
  if (take(";")) return;
  if (take("if")) return conditional();
  if (take("unrolled")) {
    expect("for");
    return loop(true);
  }
  if (take("for")) return loop(false);
  if (begins_type()) return declaration();
  assignment();
  expect(";");
}

void Compiler::block() {
  expect("{");
  scopes_.emplace_back();
  while (!take("}")) statement();
  scopes_.pop_back();
}

void Compiler::declaration() {
  const bool is_const = take("const");
  const bool is_shared = take("shared");
  const Type of = type();
  do {
    declare_one(of, is_const, is_shared);
  } while (take(","));
  expect(";");
}

void Compiler::declare_one(Type of, bool is_const, bool is_shared) {
  const bool is_pointer = is_shared && take("*");
  const std::string declared = name();
  if (is_pointer) {
    expect("=");
    const Named pointer = postfix();
    Place place = std::get<Place>(pointer);
    if (take("+")) {
      // The pointer's arithmetic: what follows is one index.
      Value index = binary(0);
      place = arithmetic_.at(place, index);
      place.sizes = {0};
    }
    if (place.type != of) fail("expected a pointer to the same type");
    declare(declared, place);
    return;
  }
  if (is("[")) return declare_array(declared, of, is_shared);
  if (is_shared) fail("expected an array or a pointer behind 'shared'");
  Value value{of};
  const bool has_value = take("=");
  if (has_value) value = arithmetic_.converted(expression(), of);
  if (is_const) return declare(declared, value);
  Place place{.type = of};
  if (of.is_byte()) fail("expected a vector of bytes to be const, or an array");
  for (int i = 0; i < of.width; ++i)
    place.variables.push_back(module_.local(arithmetic_.id_of(of)));
  if (has_value) arithmetic_.store(place, value);
  declare(declared, place);
}

void Compiler::declare_array(const std::string& declared, Type of, bool is_shared) {
  Place place{.type = of, .stored = of.scalar, .index = arithmetic_.integer(0)};
  std::int64_t count = of.width;
  while (take("[")) {
    const Value size = expression();
    if (!size.constant || *size.constant < 1) fail("expected a constant as an array's size");
    place.sizes.push_back(*size.constant);
    count *= *size.constant;
    expect("]");
  }
  const Id array = module_.array_of(arithmetic_.id_of(of), static_cast<std::uint32_t>(count));
  place.storage = is_shared ? Class::kWorkgroup : Class::kFunction;
  place.array = is_shared ? module_.global(Class::kWorkgroup, array) : module_.local(array);
  declare(declared, place);
  if (!take("=")) return;
  expect("{");
  for (std::int64_t i = 0; !take("}"); ++i) {
    arithmetic_.store(arithmetic_.at(place, arithmetic_.integer(i)), expression());
    take(",");
  }
}

void Compiler::change_by_one(const Place& place, std::string_view sign) {
  arithmetic_.store(place,
                    arithmetic_.binary(sign, arithmetic_.load(place), arithmetic_.integer(1)));
}

// Also a call.
void Compiler::assignment() {
  if (is("++") || is("--")) {
    const std::string sign(1, tokens_[at_++].text[0]);
    return change_by_one(std::get<Place>(postfix()), sign);
  }
  if (token().kind == Token::Kind::kName && tokens_[at_ + 1].text == "(" &&
      call_statement(token().text))
    return;
  const Named named = postfix();
  if (std::holds_alternative<Value>(named)) return;
  const Place& place = std::get<Place>(named);
  if (is("++") || is("--")) return change_by_one(place, tokens_[at_++].text.substr(0, 1));
  if (take("=")) return arithmetic_.store(place, expression());
  const std::string sign = token().text;
  if (sign.size() < 2 || sign.back() != '=') fail("expected an assignment, got '", sign, "'");
  ++at_;
  const Value right = expression();
  arithmetic_.store(
      place, arithmetic_.binary(sign.substr(0, sign.size() - 1), arithmetic_.load(place), right));
}

void Compiler::begin_block(Id label) {
  ++effects_;
  block_ = label;
  module_.emit(Op::kLabel, {label});
}

void Compiler::branch(Id to) { module_.emit(Op::kBranch, {to}); }

void Compiler::conditional() {
  expect("(");
  const Id condition = arithmetic_.condition(expression());
  expect(")");
  const Id yes = module_.next();
  const Id no = module_.next();
  const Id merge = module_.next();
  module_.emit(Op::kSelectionMerge, {merge, 0});
  module_.emit(Op::kBranchConditional, {condition, yes, no});
  begin_block(yes);
  scopes_.emplace_back();
  statement();
  scopes_.pop_back();
  branch(merge);
  begin_block(no);
  if (take("else")) {
    scopes_.emplace_back();
    statement();
    scopes_.pop_back();
  }
  branch(merge);
  begin_block(merge);
}

void Compiler::loop(bool is_unrolled) {
  expect("(");
  scopes_.emplace_back();
  if (begins_type()) {
    declaration();
  } else {
    expect(";");
  }
  const Id header = module_.next();
  const Id test = module_.next();
  const Id body = module_.next();
  const Id next = module_.next();
  const Id merge = module_.next();
  branch(header);
  begin_block(header);
  module_.emit(Op::kLoopMerge, {merge, next, is_unrolled ? kUnroll : 0});
  branch(test);
  begin_block(test);
  const Id condition = arithmetic_.condition(expression());
  expect(";");
  module_.emit(Op::kBranchConditional, {condition, body, merge});
  const std::size_t step = at_;
  skip_to_closing();
  begin_block(body);
  scopes_.emplace_back();
  statement();
  scopes_.pop_back();
  branch(next);
  begin_block(next);
  const std::size_t behind = std::exchange(at_, step);
  assignment();
  expect(")");
  at_ = behind;
  branch(header);
  begin_block(merge);
  scopes_.pop_back();
}

}  // namespace flownpu::gpu::spirv
