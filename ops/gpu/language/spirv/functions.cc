// SPDX-License-Identifier: Apache-2.0
// Calls: of the language's words, of C's functions, of functions that the text defines, and of the
// accesses to memory that the dialect writes (dialect.cc).
#include <algorithm>
#include <string>
#include <utility>

#include "ops/error.h"
#include "ops/gpu/language/spirv/compiler.h"

namespace flownpu::gpu::spirv {
namespace {

constexpr std::uint32_t kWorkgroupScope = 2;
constexpr std::uint32_t kAcquireReleaseOfWorkgroup = 0x8 | 0x100;
constexpr std::uint32_t kMakeAvailableAndVisible = 0x2000 | 0x4000;  // in Vulkan's memory model

struct Mathematics {
  std::string_view name;
  Function of_floats;
  Function of_ints = Function::kRoundEven;  // that: there is none
  Function of_uints = Function::kRoundEven;
};

constexpr Mathematics kMathematics[] = {{"fabs", Function::kFAbs},
                                        {"sin", Function::kSin},
                                        {"cos", Function::kCos},
                                        {"pow", Function::kPow},
                                        {"exp", Function::kExp},
                                        {"log", Function::kLog},
                                        {"sqrt", Function::kSqrt},
                                        {"fmin", Function::kNMin},
                                        {"fmax", Function::kNMax},
                                        {"min", Function::kNMin, Function::kSMin, Function::kUMin},
                                        {"max", Function::kNMax, Function::kSMax, Function::kUMax}};

// `name` without the beginning, or "" if it begins otherwise.
std::string_view behind(std::string_view name, std::string_view beginning) {
  return name.starts_with(beginning) ? name.substr(beginning.size()) : std::string_view();
}

}  // namespace

Compiler::Named Compiler::call(const std::string& called) {
  Value result;
  if (call_memory(called, result) || call_matrix(called, result)) return result;
  const std::vector<Value> given = arguments();
  for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
    const auto found = scope->find(called);
    if (found != scope->end() && std::holds_alternative<Declared>(found->second))
      return call_declared(std::get<Declared>(found->second), given);
  }
  return call_builtin(called, given);
}

// Emits the function's body in the place of the call.
Value Compiler::call_declared(const Declared& function, const std::vector<Value>& given) {
  if (given.size() != function.parameters.size())
    fail("expected ", function.parameters.size(), " arguments, got ", given.size());
  std::vector<std::map<std::string, Symbol>> outside(scopes_.begin() + 1, scopes_.end());
  scopes_.resize(1);
  scopes_.emplace_back();
  for (std::size_t i = 0; i < given.size(); ++i)
    declare(function.parameters[i].second,
            arithmetic_.converted(given[i], function.parameters[i].first));
  const std::size_t behind = std::exchange(at_, function.body);
  while (!is("return")) statement();
  expect("return");
  const Value result = arithmetic_.converted(expression(), function.type);
  at_ = behind;
  scopes_.resize(1);
  scopes_.insert(scopes_.end(), outside.begin(), outside.end());
  return result;
}

// load_FORMAT(tensor, index), and with a number of elements load4_FORMAT.
bool Compiler::call_memory(const std::string& called, Value& result) {
  int width = 1;
  std::string_view format = behind(called, "load_");
  for (const int several : {4, 8}) {
    if (!format.empty()) break;
    format = behind(called, "load" + std::to_string(several) + "_");
    width = several;
  }
  if (format.empty()) return false;
  if (called.starts_with("load_")) width = 1;
  expect("(");
  const auto tensor = std::get<TensorName>(find(name()));
  expect(",");
  const Value index = expression();
  expect(")");
  ++effects_;
  result = memory_.load(tensor, format, index, width);
  return true;
}

// Calls without a value.
bool Compiler::call_statement(const std::string& called) {
  if (called == "synchronise") {
    at_ += 2;
    expect(")");
    ++effects_;
    const Id scope = arithmetic_.integer(kWorkgroupScope, Scalar::kUint).components[0].id;
    const std::uint32_t made = module_.has_matrices() ? kMakeAvailableAndVisible : 0;
    const Id order =
        arithmetic_.integer(kAcquireReleaseOfWorkgroup | made, Scalar::kUint).components[0].id;
    module_.emit(Op::kControlBarrier, {scope, scope, order});
    return true;
  }
  if (called == "to_array") {
    store_matrix();
    return true;
  }
  if (const std::string_view format = behind(called, "store_"); !format.empty()) {
    at_ += 2;
    const auto tensor = std::get<TensorName>(find(name()));
    expect(",");
    const Value index = expression();
    expect(",");
    const Value value = expression();
    expect(")");
    ++effects_;
    memory_.store(tensor, format, index, value);
    return true;
  }
  if (!called.starts_with("vstore")) return false;
  at_ += 2;
  const Value value = expression();
  expect(",");
  const Value index = arithmetic_.binary("*", expression(), arithmetic_.integer(value.type.width));
  expect(",");
  const Place array = std::get<Place>(find(name()));
  expect(")");
  for (int i = 0; i < value.type.width; ++i) {
    const Component& one = value.components[static_cast<std::size_t>(i)];
    arithmetic_.store(arithmetic_.at(array, arithmetic_.binary("+", index, arithmetic_.integer(i))),
                      {{value.type.scalar}, {one}});
  }
  return true;
}

Value Compiler::call_builtin(const std::string& called, const std::vector<Value>& given) {
  if (called == "lane") return {{Scalar::kInt}, {{lane_}}};
  if (const Value made = call_of_matrices(called, given); !made.components.empty()) return made;
  if (given.empty()) fail("expected arguments of ", called);
  if (called == "group") {
    const std::optional<std::int64_t> axis = given[0].constant;
    if (!axis) fail("expected a number in group(...)");
    const Id part = module_.emit(Op::kCompositeExtract, module_.of_uint(),
                                 {group_, static_cast<std::uint32_t>(*axis)});
    return {{Scalar::kInt}, {{module_.emit(Op::kBitcast, module_.of_int(), {part})}}};
  }
  if (called == "dot4" && given.size() == 3) return dot4(given[0], given[1], given[2]);
  if (called == "looked_up" && given.size() == 2) return looked_up(given[0], given[1]);
  if (const std::string_view to = behind(called, "as_"); !to.empty())
    return arithmetic_.reinterpreted(given[0], type_of(to));
  if (const std::string_view to = behind(called, "convert_"); !to.empty())
    return call_conversion(to, given[0]);
  const auto* found = std::ranges::find(kMathematics, std::string_view(called), &Mathematics::name);
  if (found == std::end(kMathematics))
    fail("expected a function of the kernel language, got ", called);
  std::vector<Value> operands = given;
  if (found->of_ints == Function::kRoundEven)
    for (Value& one : operands) one = arithmetic_.converted(one, {Scalar::kFloat, one.type.width});
  if (operands.size() == 2) arithmetic_.match(operands[0], operands[1]);
  const Scalar scalar = operands[0].type.scalar;
  return arithmetic_.mapped(scalar == Scalar::kFloat  ? found->of_floats
                            : scalar == Scalar::kUint ? found->of_uints
                                                      : found->of_ints,
                            operands);
}

// `name`: of a type, and behind it how to round and whether to saturate.
Value Compiler::call_conversion(std::string_view name, const Value& given) {
  const std::string_view type = name.substr(0, name.find('_'));
  Type to = type_of(type);
  Value value = given;
  if (name.ends_with("_rte")) value = arithmetic_.mapped(Function::kRoundEven, {value});
  if (name.find("_sat") != std::string_view::npos) {
    if (type != "char") fail("expected char in a conversion that saturates, got ", type);
    value = arithmetic_.mapped(Function::kNMin, {value, arithmetic_.real(127)});
    value = arithmetic_.mapped(Function::kNMax, {value, arithmetic_.real(-128)});
    to.scalar = Scalar::kInt;
  }
  return arithmetic_.converted(value, to);
}

// For each byte of `places` that byte of the table: the word by two choices, then the byte in it.
Value Compiler::looked_up(const Value& table, const Value& places) {
  Value bytes{{Scalar::kUchar, 4 * places.type.width}};
  const auto word = [&](std::size_t i) { return Value{{Scalar::kUint}, {table.components[i]}}; };
  const Value all = arithmetic_.reinterpreted(places, bytes.type);
  for (std::size_t i = 0; i < all.components.size(); ++i) {
    const Value place{{Scalar::kInt}, {{arithmetic_.component(all, i)}}};
    const auto has = [&](int bit) {
      return arithmetic_.condition(arithmetic_.binary("&", place, arithmetic_.integer(bit)));
    };
    const Id second = has(4);
    const Value found = arithmetic_.selected(has(8), arithmetic_.selected(second, word(3), word(2)),
                                             arithmetic_.selected(second, word(1), word(0)));
    const Value shift = arithmetic_.binary(
        "*", arithmetic_.binary("&", place, arithmetic_.integer(3)), arithmetic_.integer(8));
    bytes.components.push_back({arithmetic_.binary(">>", found, shift).components[0].id, 0});
  }
  return arithmetic_.reinterpreted(bytes, places.type);
}

Value Compiler::dot4(const Value& a, const Value& b, const Value& c) {
  constexpr std::uint32_t kPacked4x8 = 0;
  const Id dot = module_.emit(Op::kSDot, module_.of_int(),
                              {arithmetic_.words(a).at(0), arithmetic_.words(b).at(0), kPacked4x8});
  return arithmetic_.binary("+", {{Scalar::kInt}, {{dot}}}, c);
}

}  // namespace flownpu::gpu::spirv
