// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/language/spirv/arithmetic.h"

#include <algorithm>
#include <bit>

#include "ops/error.h"

namespace flownpu::gpu::spirv {
namespace {

struct Operation {
  std::string_view sign;
  Op of_ints;
  Op of_uints;
  Op of_floats;
  bool is_comparison = false;
};

constexpr Op kNone = Op::kReturn;
constexpr Operation kOperations[] = {
    {"+", Op::kIAdd, Op::kIAdd, Op::kFAdd},
    {"-", Op::kISub, Op::kISub, Op::kFSub},
    {"*", Op::kIMul, Op::kIMul, Op::kFMul},
    {"/", Op::kSDiv, Op::kUDiv, Op::kFDiv},
    {"%", Op::kSRem, Op::kUMod, kNone},
    {"<<", Op::kShiftLeftLogical, Op::kShiftLeftLogical, kNone},
    {">>", Op::kShiftRightArithmetic, Op::kShiftRightLogical, kNone},
    {"&", Op::kBitwiseAnd, Op::kBitwiseAnd, kNone},
    {"|", Op::kBitwiseOr, Op::kBitwiseOr, kNone},
    {"^", Op::kBitwiseXor, Op::kBitwiseXor, kNone},
    {"==", Op::kIEqual, Op::kIEqual, Op::kFOrdEqual, true},
    {"!=", Op::kINotEqual, Op::kINotEqual, Op::kFUnordNotEqual, true},
    {"<", Op::kSLessThan, Op::kULessThan, Op::kFOrdLessThan, true},
    {"<=", Op::kSLessThanEqual, Op::kULessThanEqual, Op::kFOrdLessThanEqual, true},
    {">", Op::kSGreaterThan, Op::kUGreaterThan, Op::kFOrdGreaterThan, true},
    {">=", Op::kSGreaterThanEqual, Op::kUGreaterThanEqual, Op::kFOrdGreaterThanEqual, true},
};

std::optional<std::int64_t> result_of(std::string_view sign, std::int64_t a, std::int64_t b) {
  if (sign == "+") return a + b;
  if (sign == "-") return a - b;
  if (sign == "*") return a * b;
  if (sign == "/" && b != 0) return a / b;
  if (sign == "%" && b != 0) return a % b;
  if (sign == "<<" && b >= 0 && b < 32) return a * (std::int64_t{1} << b);
  return std::nullopt;
}

Scalar in_arithmetic(Scalar scalar) {
  const bool is_small =
      scalar == Scalar::kBool || scalar == Scalar::kChar || scalar == Scalar::kUchar;
  return is_small ? Scalar::kInt : scalar;
}

}  // namespace

Id Arithmetic::id_of(Scalar scalar) {
  switch (scalar) {
    case Scalar::kBool:
      return module_.of_bool();
    case Scalar::kFloat:
      return module_.of_float();
    case Scalar::kUint:
      return module_.of_uint();
    case Scalar::kLeft:
      return module_.matrix_of(Use::kLeft);
    case Scalar::kRight:
      return module_.matrix_of(Use::kRight);
    case Scalar::kSum:
      return module_.matrix_of(Use::kSum);
    case Scalar::kInt:
    case Scalar::kChar:
    case Scalar::kUchar:
      break;
  }
  return module_.of_int();
}

Value Arithmetic::integer(std::int64_t number, Scalar scalar) {
  const Id id = module_.constant(id_of(scalar), static_cast<std::uint32_t>(number));
  return {{scalar}, {{id}}, number};
}

Value Arithmetic::real(float number) {
  return {{Scalar::kFloat}, {{module_.constant(module_.of_float(), std::bit_cast<Id>(number))}}};
}

Id Arithmetic::component(const Value& value, std::size_t which) {
  const Component& one = value.components[which];
  if (one.byte == Component::kWhole) return one.id;
  const Id first = integer(std::int64_t{one.byte} * 8).components[0].id;
  const Id bits = integer(8).components[0].id;
  if (value.type.scalar == Scalar::kUchar) {
    const Id made = module_.emit(Op::kBitFieldUExtract, module_.of_uint(), {one.id, first, bits});
    return module_.emit(Op::kBitcast, module_.of_int(), {made});
  }
  const Id word = module_.emit(Op::kBitcast, module_.of_int(), {one.id});
  return module_.emit(Op::kBitFieldSExtract, module_.of_int(), {word, first, bits});
}

std::vector<Id> Arithmetic::words(const Value& value) {
  std::vector<Id> made;
  for (std::size_t at = 0; at < value.components.size(); at += 4) {
    const Component& first = value.components[at];
    bool is_word = at + 4 <= value.components.size();
    for (std::size_t i = 0; is_word && i < 4; ++i) {
      const Component& one = value.components[at + i];
      is_word = one.id == first.id && one.byte == static_cast<int>(i);
    }
    if (is_word) {
      made.push_back(first.id);
      continue;
    }
    Id word = integer(0, Scalar::kUint).components[0].id;
    for (std::size_t i = 0; i < 4 && at + i < value.components.size(); ++i) {
      const Id bits = module_.emit(Op::kBitcast, module_.of_uint(), {component(value, at + i)});
      word = module_.emit(Op::kBitFieldInsert, module_.of_uint(),
                          {word, bits, integer(static_cast<std::int64_t>(i) * 8).components[0].id,
                           integer(8).components[0].id});
    }
    made.push_back(word);
  }
  return made;
}

Value Arithmetic::converted(const Value& value, const Type& type) {
  if (value.type == type) return value;
  if (value.type.is_matrix() || type.is_matrix()) fail("expected the same type of matrix");
  if (value.type.width == 1 && type.width > 1) {
    const Value one = converted(value, {type.scalar});
    Value made{type};
    if (type.is_byte()) {
      if (!value.constant) fail("expected a constant as all bytes of a vector");
      const auto byte = static_cast<std::uint32_t>(*value.constant & 0xff);
      const Id word = integer(std::int64_t{byte} * 0x01010101, Scalar::kUint).components[0].id;
      for (int i = 0; i < type.width; ++i) made.components.push_back({word, i % 4});
      made.constant = byte;
      return made;
    }
    made.components.assign(static_cast<std::size_t>(type.width), one.components[0]);
    return made;
  }
  if (value.type.width != type.width)
    fail("expected a value of ", type.width, " components, got ", value.type.width);
  if (type.is_byte()) return {type, value.components, value.constant};  // scalars only, as ints
  Value made{type};
  const Scalar from = in_arithmetic(value.type.scalar);
  if (value.constant && type.scalar == Scalar::kFloat)
    return real(static_cast<float>(*value.constant));
  if (value.constant && (type.scalar == Scalar::kInt || type.scalar == Scalar::kUint))
    return integer(*value.constant, type.scalar);
  for (std::size_t i = 0; i < value.components.size(); ++i) {
    Id id = component(value, i);
    if (value.type.scalar == Scalar::kBool) {
      const Id one = integer(1).components[0].id;
      id = module_.emit(Op::kSelect, module_.of_int(), {id, one, integer(0).components[0].id});
    }
    if (type.scalar == Scalar::kBool) {
      Value whole{{from}, {{id}}};
      id = condition(whole);
    } else if (from != type.scalar) {
      const Op op = type.is_float() ? (from == Scalar::kUint ? Op::kConvertUToF : Op::kConvertSToF)
                    : from != Scalar::kFloat       ? Op::kBitcast
                    : type.scalar == Scalar::kUint ? Op::kConvertFToU
                                                   : Op::kConvertFToS;
      id = module_.emit(op, id_of(type), {id});
    }
    made.components.push_back({id});
  }
  return made;
}

Value Arithmetic::reinterpreted(const Value& value, const Type& type) {
  Value made{type};
  if (value.type.is_byte() && type.is_byte()) {
    made.components = value.components;
  } else if (type.is_byte()) {
    for (std::size_t i = 0; i < value.components.size(); ++i) {
      Id word = value.components[i].id;
      if (value.type.scalar != Scalar::kUint)
        word = module_.emit(Op::kBitcast, module_.of_uint(), {word});
      for (int byte = 0; byte < 4; ++byte) made.components.push_back({word, byte});
    }
  } else {
    const bool is_bytes = value.type.is_byte();
    const Scalar from = is_bytes ? Scalar::kUint : value.type.scalar;
    std::vector<Id> all;
    if (is_bytes) all = words(value);
    for (std::size_t i = 0; !is_bytes && i < value.components.size(); ++i)
      all.push_back(value.components[i].id);
    for (const Id one : all)
      made.components.push_back(
          {from == type.scalar ? one : module_.emit(Op::kBitcast, id_of(type), {one})});
  }
  if (made.components.size() != static_cast<std::size_t>(type.width))
    fail("expected as many bits in both types of an as_ function, got ", value.components.size(),
         " components for ", type.width);
  return made;
}

Id Arithmetic::condition(const Value& value) {
  if (value.type.width != 1) fail("expected a number as a condition, got a vector");
  if (value.type.scalar == Scalar::kBool) return value.components[0].id;
  return binary("!=", value, integer(0)).components[0].id;
}

Type Arithmetic::common(const Type& left, const Type& right) {
  const Scalar a = in_arithmetic(left.scalar);
  const Scalar b = in_arithmetic(right.scalar);
  const int width = std::max(left.width, right.width);
  if (left.width != right.width) return {left.width > 1 ? a : b, width};
  for (const Scalar one : {Scalar::kFloat, Scalar::kUint})
    if (a == one || b == one) return {one, width};
  return {Scalar::kInt, width};
}

void Arithmetic::match(Value& left, Value& right) {
  const Type type = common(left.type, right.type);
  left = converted(left, type);
  right = converted(right, type);
}

Value Arithmetic::of_bytes(std::string_view sign, const Value& left, const Value& right) {
  if (left.type != right.type || !right.constant || left.type.scalar != Scalar::kUchar ||
      (sign != "&" && sign != ">>"))
    fail("expected & or >> of a vector of uchar with one number, got ", sign);
  const auto by = static_cast<std::uint32_t>(*right.constant);
  const bool shifts = sign == ">>";
  const Id mask =
      integer(std::int64_t{shifts ? 0xffU >> by : by} * 0x01010101, Scalar::kUint).components[0].id;
  Value made{left.type};
  for (Id word : words(left)) {
    if (shifts)
      word = module_.emit(Op::kShiftRightLogical, module_.of_uint(),
                          {word, integer(by).components[0].id});
    word = module_.emit(Op::kBitwiseAnd, module_.of_uint(), {word, mask});
    for (int byte = 0; byte < 4; ++byte) made.components.push_back({word, byte});
  }
  return made;
}

Value Arithmetic::binary(std::string_view sign, Value left, Value right) {
  if (left.type.is_matrix() || right.type.is_matrix())
    fail("expected numbers beside ", sign, ", got a matrix");
  if (left.type.is_byte() && left.type.width > 1) return of_bytes(sign, left, right);
  if (left.constant && right.constant) {
    const auto known = result_of(sign, *left.constant, *right.constant);
    if (known) {
      const bool is_uint = left.type.scalar == Scalar::kUint || right.type.scalar == Scalar::kUint;
      return integer(*known, is_uint ? Scalar::kUint : Scalar::kInt);
    }
  }
  if (sign == "<<" || sign == ">>") {
    left = converted(left, {in_arithmetic(left.type.scalar), left.type.width});
    right = converted(right, left.type);
  } else {
    match(left, right);
  }
  const auto* found = std::ranges::find(kOperations, sign, &Operation::sign);
  const bool is_float = left.type.is_float();
  const Op op = is_float                            ? found->of_floats
                : left.type.scalar == Scalar::kUint ? found->of_uints
                                                    : found->of_ints;
  if (op == kNone) fail("expected integers beside ", sign, ", got floats");
  Value made{{found->is_comparison ? Scalar::kBool : left.type.scalar, left.type.width}};
  for (std::size_t i = 0; i < left.components.size(); ++i)
    made.components.push_back(
        {module_.emit(op, id_of(made.type), {left.components[i].id, right.components[i].id})});
  return made;
}

Value Arithmetic::negated(const Value& value) {
  if (value.constant) return integer(-*value.constant);
  const Value given = converted(value, {in_arithmetic(value.type.scalar), value.type.width});
  Value made{given.type};
  for (const Component& one : given.components)
    made.components.push_back({module_.emit(given.type.is_float() ? Op::kFNegate : Op::kSNegate,
                                            id_of(given.type), {one.id})});
  return made;
}

Value Arithmetic::inverted(const Value& value) {
  const Value given = converted(value, {in_arithmetic(value.type.scalar), value.type.width});
  Value made{given.type};
  for (const Component& one : given.components)
    made.components.push_back({module_.emit(Op::kNot, id_of(given.type), {one.id})});
  return made;
}

Value Arithmetic::denied(const Value& value) {
  return {{Scalar::kBool},
          {{module_.emit(Op::kLogicalNot, module_.of_bool(), {condition(value)})}}};
}

Value Arithmetic::selected(Id condition, const Value& left, const Value& right) {
  Value made{left.type};
  for (std::size_t i = 0; i < left.components.size(); ++i)
    made.components.push_back(
        {module_.emit(Op::kSelect, id_of(left.type),
                      {condition, left.components[i].id, right.components[i].id})});
  return made;
}

Value Arithmetic::mapped(Function function, const std::vector<Value>& operands) {
  Value made{operands.front().type};
  for (std::size_t i = 0; i < operands.front().components.size(); ++i) {
    const Id first = operands[0].components[i].id;
    const Id id = operands.size() == 1 ? module_.call(function, id_of(made.type), {first})
                                       : module_.call(function, id_of(made.type),
                                                      {first, operands[1].components[i].id});
    made.components.push_back({id});
  }
  return made;
}

Place Arithmetic::at(Place place, const Value& index) {
  if (place.sizes.empty()) fail("expected an array or shared memory before '['");
  place.sizes.erase(place.sizes.begin());
  std::int64_t step = place.type.width;
  for (const std::int64_t size : place.sizes) step *= size;
  place.index =
      binary("+", place.index, binary("*", converted(index, {Scalar::kInt}), integer(step)));
  return place;
}

Id Arithmetic::element(const Place& place, std::int64_t offset) {
  const Value at = binary("+", place.index, integer(offset));
  const Id pointer = module_.pointer_to(place.storage, id_of(place.stored));
  return module_.emit(Op::kAccessChain, pointer, {place.array, at.components[0].id});
}

Id Arithmetic::load_from(const Place& place, Id pointer, Scalar stored) {
  const bool is_marked = module_.has_matrices() && place.storage == Class::kWorkgroup;
  const Id id = is_marked ? module_.emit(Op::kLoad, id_of(stored), {pointer, kNonPrivate})
                          : module_.emit(Op::kLoad, id_of(stored), {pointer});
  if (id_of(stored) == id_of(place.type)) return id;
  return module_.emit(Op::kBitcast, id_of(place.type), {id});
}

Value Arithmetic::load(const Place& place) {
  if (!place.sizes.empty()) fail("expected '[' behind an array's name");
  Value made{place.type};
  for (const Id variable : place.variables)
    made.components.push_back({load_from(place, variable, place.type.scalar)});
  for (int i = 0; place.array != 0 && i < place.type.width; ++i)
    made.components.push_back({load_from(place, element(place, i), place.stored)});
  return made;
}

void Arithmetic::store_to(const Place& place, Id pointer, Id value) {
  if (module_.has_matrices() && place.storage == Class::kWorkgroup)
    module_.emit(Op::kStore, {pointer, value, kNonPrivate});
  else
    module_.emit(Op::kStore, {pointer, value});
}

void Arithmetic::store(const Place& place, const Value& value) {
  if (!place.sizes.empty()) fail("expected '[' behind an array's name");
  const Value given = converted(value, place.type);
  for (std::size_t i = 0; i < given.components.size(); ++i) {
    Id id = component(given, i);
    if (place.array == 0) {
      store_to(place, place.variables[i], id);
      continue;
    }
    if (id_of(place.stored) != id_of(place.type))
      id = module_.emit(Op::kBitcast, id_of(place.stored), {id});
    store_to(place, element(place, static_cast<std::int64_t>(i)), id);
  }
}

}  // namespace flownpu::gpu::spirv
