// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/language/spirv/memory.h"

#include <algorithm>
#include <array>

#include "ops/error.h"

namespace flownpu::gpu::spirv {
namespace {

constexpr std::uint32_t kAligned = 2;  // a memory operand; the alignment follows it
constexpr std::uint32_t kAddressBytes = 8;
constexpr std::uint32_t kParameterBytes = 4;

struct Format {
  std::string_view name;
  std::uint32_t bytes;
  Scalar value;
};

constexpr Format kFormats[] = {
    {"float32", 4, Scalar::kFloat}, {"float16", 2, Scalar::kFloat}, {"bfloat16", 2, Scalar::kFloat},
    {"int32", 4, Scalar::kInt},     {"int8", 1, Scalar::kInt},      {"uint8", 1, Scalar::kInt},
    {"uint16", 2, Scalar::kUint},   {"uint32", 4, Scalar::kUint},
};

const Format& format_of(std::string_view name) {
  const auto* found = std::ranges::find(kFormats, name, &Format::name);
  if (found == std::end(kFormats)) fail("expected elements in memory, got ", name);
  return *found;
}

}  // namespace

Memory::Memory(Module& module, Arithmetic& arithmetic, std::size_t tensors, std::size_t parameters)
    : module_(module), arithmetic_(arithmetic), tensors_(tensors) {
  const Id address = module_.vector_of(module_.of_uint(), 2);
  std::vector<std::uint32_t> offsets;
  for (std::uint32_t i = 0; i < tensors; ++i) {
    members_.push_back(address);
    offsets.push_back(i * kAddressBytes);
  }
  const auto behind = static_cast<std::uint32_t>(tensors) * kAddressBytes;
  for (std::uint32_t i = 0; i < parameters; ++i) {
    members_.push_back(module_.of_int());
    offsets.push_back(behind + i * kParameterBytes);
  }
  const Id pushed = module_.block_of({address}, std::array<std::uint32_t, 1>{0});
  const Id constant = module_.global(Class::kPushConstant, pushed);
  const Id zero = module_.constant(module_.of_int(), 0);
  const Id member = module_.first(
      Op::kAccessChain, module_.pointer_to(Class::kPushConstant, address), {constant, zero});
  const Id given = module_.first(Op::kLoad, address, {member});
  const Id block = module_.block_of(members_, offsets);
  arguments_ = module_.first(Op::kBitcast, module_.pointer_to(Class::kPhysicalStorageBuffer, block),
                             {given});
}

Value Memory::parameter(std::uint32_t number) {
  const Id pointer = module_.pointer_to(Class::kPhysicalStorageBuffer, module_.of_int());
  const Id member =
      module_.constant(module_.of_int(), static_cast<std::uint32_t>(tensors_) + number);
  const Id place = module_.first(Op::kAccessChain, pointer, {arguments_, member});
  return {{Scalar::kInt},
          {{module_.first(Op::kLoad, module_.of_int(), {place, kAligned, kParameterBytes})}}};
}

Id Memory::place(TensorName tensor, Id element, std::uint32_t bytes, Id at) {
  const Id pair = module_.vector_of(module_.of_uint(), 2);
  if (!addresses_.contains(tensor.number)) {
    const Id pointer = module_.pointer_to(Class::kPhysicalStorageBuffer, pair);
    const Id member = module_.constant(module_.of_int(), tensor.number);
    const Id place = module_.first(Op::kAccessChain, pointer, {arguments_, member});
    addresses_[tensor.number] = module_.first(Op::kLoad, pair, {place, kAligned, kAddressBytes});
  }
  const Id block = module_.block_of(element, bytes);
  Id& base = bases_[{tensor.number, block}];
  if (base == 0)
    base = module_.first(Op::kBitcast, module_.pointer_to(Class::kPhysicalStorageBuffer, block),
                         {addresses_[tensor.number]});
  return module_.emit(Op::kAccessChain, module_.pointer_to(Class::kPhysicalStorageBuffer, element),
                      {base, module_.constant(module_.of_int(), 0), at});
}

// Floats of 16 bits are read as whole words where there are several, so that the device needs no
// vectors of 16-bit numbers.
Value Memory::load(TensorName tensor, std::string_view format, const Value& index, int width) {
  const Format& of = format_of(format);
  const auto elements = static_cast<std::uint32_t>(width);
  const Id uint = module_.of_uint();
  if (width > 1 && of.bytes < 4) {
    const std::uint32_t count = of.bytes * elements / 4;
    const Value first = arithmetic_.binary("/", index, arithmetic_.integer(4 / of.bytes));
    const Value all = load(tensor, "uint32", first, static_cast<int>(count));
    Value made{{Scalar::kFloat, width}};
    if (of.bytes == 1) return arithmetic_.reinterpreted(all, {Scalar::kChar, width});
    const Id two = module_.vector_of(module_.of_float(), 2);
    for (const Component& word : all.components) {
      if (format != "float16") break;
      const Id floats = module_.call(Function::kUnpackHalf2x16, two, {word.id});
      for (const std::uint32_t half : {0U, 1U})
        made.components.push_back(
            {module_.emit(Op::kCompositeExtract, module_.of_float(), {floats, half})});
    }
    if (format == "float16") return made;
    for (const Component& word : all.components)
      for (const Value& bits :
           {arithmetic_.binary("<<", {{Scalar::kUint}, {word}}, arithmetic_.integer(16)),
            arithmetic_.binary("&", {{Scalar::kUint}, {word}},
                               arithmetic_.integer(0xffff0000U, Scalar::kUint))})
        made.components.push_back(arithmetic_.reinterpreted(bits, {Scalar::kFloat}).components[0]);
    return made;
  }
  if (width > 1) {
    const Id element = of.value == Scalar::kFloat ? module_.of_float() : uint;
    const Id vector = module_.vector_of(element, elements);
    const Value at = arithmetic_.binary("/", index, arithmetic_.integer(width));
    const Id from = place(tensor, vector, elements * 4, at.components[0].id);
    const Id loaded = module_.emit(Op::kLoad, vector, {from, kAligned, elements * 4});
    Value made{{of.value, width}};
    for (std::uint32_t i = 0; i < elements; ++i)
      made.components.push_back({module_.emit(Op::kCompositeExtract, element, {loaded, i})});
    return made;
  }
  const Id at = arithmetic_.converted(index, {Scalar::kInt}).components[0].id;
  const Id element = format == "float16" ? module_.of_float(16)
                     : of.bytes < 4      ? module_.of_int(of.bytes * 8)
                                         : arithmetic_.id_of(of.value);
  const Id from = place(tensor, element, of.bytes, at);
  Id id = module_.emit(Op::kLoad, element, {from, kAligned, of.bytes});
  if (format == "float16") id = module_.emit(Op::kFConvert, module_.of_float(), {id});
  if (format == "int8") id = module_.emit(Op::kSConvert, module_.of_int(), {id});
  if (format == "uint8") {
    id = module_.emit(Op::kUConvert, uint, {id});
    id = module_.emit(Op::kBitcast, module_.of_int(), {id});
  }
  if (format == "bfloat16") {
    id = module_.emit(Op::kUConvert, uint, {id});
    const Value bits = arithmetic_.binary("<<", {{Scalar::kUint}, {{id}}}, arithmetic_.integer(16));
    return arithmetic_.reinterpreted(bits, {Scalar::kFloat});
  }
  return {{of.value}, {{id}}};
}

void Memory::store(TensorName tensor, std::string_view format, const Value& index,
                   const Value& value) {
  const Format& of = format_of(format);
  const Id at = arithmetic_.converted(index, {Scalar::kInt}).components[0].id;
  Id id = arithmetic_.converted(value, {of.value}).components[0].id;
  Id element = arithmetic_.id_of(of.value);
  if (format == "float16") {
    element = module_.of_float(16);
    id = module_.emit(Op::kFConvert, element, {id});
    constexpr std::uint32_t kToNearestEven = 0;
    module_.decorate(id, Decoration::kFPRoundingMode, {kToNearestEven});
  } else if (of.bytes < 4) {
    element = module_.of_int(of.bytes * 8);
    id = module_.emit(Op::kUConvert, element, {id});
  }
  module_.emit(Op::kStore, {place(tensor, element, of.bytes, at), id, kAligned, of.bytes});
}

}  // namespace flownpu::gpu::spirv
