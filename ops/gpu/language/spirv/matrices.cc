// SPDX-License-Identifier: Apache-2.0
// Words about matrices (kernel.h), by SPV_KHR_cooperative_matrix.
#include "ops/error.h"
#include "ops/gpu/language/spirv/compiler.h"

namespace flownpu::gpu::spirv {
namespace {

constexpr std::uint32_t kSubgroupId = 40;
// The order of a matrix's elements in memory.
constexpr std::int64_t kRowByRow = 0;
constexpr std::int64_t kColumnByColumn = 1;

}  // namespace

// `array, place`: a pointer to that element.
Id Compiler::element_of_array() {
  const Place array = std::get<Place>(find(name()));
  if (array.storage != Class::kWorkgroup) fail("expected an array of the work-group");
  expect(",");
  return arithmetic_.element(arithmetic_.at(array, expression()), 0);
}

bool Compiler::call_matrix(const std::string& called, Value& result) {
  const bool is_left = called == "left_from";
  const bool is_sum = called == "sum_from";
  if (!is_left && !is_sum && called != "right_from") return false;
  expect("(");
  const Id pointer = element_of_array();
  expect(",");
  const Id stride = arithmetic_.converted(expression(), {}).components[0].id;
  expect(")");
  ++effects_;
  const Type type{is_left ? Scalar::kLeft : is_sum ? Scalar::kSum : Scalar::kRight};
  const Id order = arithmetic_.integer(is_left ? kRowByRow : kColumnByColumn).components[0].id;
  result = {type,
            {{module_.emit(Op::kCooperativeMatrixLoad, arithmetic_.id_of(type),
                           {pointer, order, stride, kNonPrivate})}}};
  return true;
}

void Compiler::store_matrix() {
  at_ += 2;
  const Value sum = arithmetic_.converted(expression(), {Scalar::kSum});
  expect(",");
  const Id pointer = element_of_array();
  expect(",");
  const Id stride = arithmetic_.converted(expression(), {}).components[0].id;
  expect(")");
  ++effects_;
  const Id order = arithmetic_.integer(kColumnByColumn).components[0].id;
  module_.emit(Op::kCooperativeMatrixStore,
               {pointer, sum.components[0].id, order, stride, kNonPrivate});
}

// Without components for other words.
Value Compiler::call_of_matrices(const std::string& called, const std::vector<Value>& given) {
  if (called == "subgroup" && given.empty()) {
    if (subgroup_ == 0) {
      const Id uint = module_.of_uint();
      subgroup_ = module_.first(Op::kLoad, uint, {module_.builtin(kSubgroupId, uint)});
      subgroup_ = module_.first(Op::kBitcast, module_.of_int(), {subgroup_});
    }
    return {{Scalar::kInt}, {{subgroup_}}};
  }
  if (called == "matrix_of" && given.size() == 1) {
    const Id number = arithmetic_.converted(given[0], {Scalar::kFloat}).components[0].id;
    return {{Scalar::kSum},
            {{module_.emit(Op::kCompositeConstruct, module_.matrix_of(Use::kSum), {number})}}};
  }
  const auto id = [&](std::size_t which, Scalar scalar) {
    return arithmetic_.converted(given[which], {scalar}).components[0].id;
  };
  if (called == "scaled" && given.size() == 2)
    return {{Scalar::kSum},
            {{module_.emit(Op::kFMul, module_.matrix_of(Use::kSum),
                           {id(0, Scalar::kSum), id(1, Scalar::kSum)})}}};
  if (called == "multiplied" && given.size() == 3) {
    return {{Scalar::kSum},
            {{module_.emit(Op::kCooperativeMatrixMulAdd, module_.matrix_of(Use::kSum),
                           {id(0, Scalar::kLeft), id(1, Scalar::kRight), id(2, Scalar::kSum)})}}};
  }
  if (called == "halves" && given.size() == 2) {
    const Id half = module_.of_float(16);
    const auto rounded = [&](const Value& value) {
      const Id number = arithmetic_.converted(value, {Scalar::kFloat}).components[0].id;
      return module_.emit(Op::kFConvert, half, {number});
    };
    const Id lower = rounded(given[0]);
    const Id both = module_.emit(Op::kCompositeConstruct, module_.vector_of(half, 2),
                                 {lower, rounded(given[1])});
    return {{Scalar::kUint}, {{module_.emit(Op::kBitcast, module_.of_uint(), {both})}}};
  }
  return {};
}

}  // namespace flownpu::gpu::spirv
