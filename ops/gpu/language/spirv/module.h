// SPDX-License-Identifier: Apache-2.0
// Module: the words of one SPIR-V 1.6 module with one compute shader, in the sections that the
// format prescribes. Types and constants are written once. The numbers of instructions and of their
// operands are those of Khronos' registry (SPIRV-Headers); spirv-val checks them in tests.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ops/gpu/language/kernel.h"

namespace flownpu::gpu::spirv {

using Id = std::uint32_t;
using Words = std::vector<std::uint32_t>;

enum class Op : std::uint16_t {
  kExtension = 10,
  kExtInstImport = 11,
  kExtInst = 12,
  kMemoryModel = 14,
  kEntryPoint = 15,
  kExecutionMode = 16,
  kCapability = 17,
  kTypeVoid = 19,
  kTypeBool = 20,
  kTypeInt = 21,
  kTypeFloat = 22,
  kTypeVector = 23,
  kTypeArray = 28,
  kTypeRuntimeArray = 29,
  kTypeStruct = 30,
  kTypePointer = 32,
  kTypeFunction = 33,
  kConstant = 43,
  kFunction = 54,
  kFunctionEnd = 56,
  kVariable = 59,
  kLoad = 61,
  kStore = 62,
  kAccessChain = 65,
  kDecorate = 71,
  kMemberDecorate = 72,
  kCompositeConstruct = 80,
  kCompositeExtract = 81,
  kConvertFToU = 109,
  kConvertFToS = 110,
  kConvertSToF = 111,
  kConvertUToF = 112,
  kUConvert = 113,
  kSConvert = 114,
  kFConvert = 115,
  kBitcast = 124,
  kSNegate = 126,
  kFNegate = 127,
  kIAdd = 128,
  kFAdd = 129,
  kISub = 130,
  kFSub = 131,
  kIMul = 132,
  kFMul = 133,
  kUDiv = 134,
  kSDiv = 135,
  kFDiv = 136,
  kUMod = 137,
  kSRem = 138,
  kLogicalOr = 166,
  kLogicalAnd = 167,
  kLogicalNot = 168,
  kSelect = 169,
  kIEqual = 170,
  kINotEqual = 171,
  kUGreaterThan = 172,
  kSGreaterThan = 173,
  kUGreaterThanEqual = 174,
  kSGreaterThanEqual = 175,
  kULessThan = 176,
  kSLessThan = 177,
  kULessThanEqual = 178,
  kSLessThanEqual = 179,
  kFOrdEqual = 180,
  kFUnordNotEqual = 183,
  kFOrdLessThan = 184,
  kFOrdGreaterThan = 186,
  kFOrdLessThanEqual = 188,
  kFOrdGreaterThanEqual = 190,
  kShiftRightLogical = 194,
  kShiftRightArithmetic = 195,
  kShiftLeftLogical = 196,
  kBitwiseOr = 197,
  kBitwiseXor = 198,
  kBitwiseAnd = 199,
  kNot = 200,
  kBitFieldInsert = 201,
  kBitFieldSExtract = 202,
  kBitFieldUExtract = 203,
  kControlBarrier = 224,
  kPhi = 245,
  kLoopMerge = 246,
  kSelectionMerge = 247,
  kLabel = 248,
  kBranch = 249,
  kBranchConditional = 250,
  kReturn = 253,
  kSDot = 4450,
  kTypeCooperativeMatrix = 4456,
  kCooperativeMatrixLoad = 4457,
  kCooperativeMatrixStore = 4458,
  kCooperativeMatrixMulAdd = 4459,
};

// Storage classes of variables and pointers.
enum class Class : std::uint32_t {
  kInput = 1,
  kWorkgroup = 4,
  kFunction = 7,
  kPushConstant = 9,
  kPhysicalStorageBuffer = 5349,
};

// A cooperative matrix's place in a product.
enum class Use : std::uint32_t { kLeft, kRight, kSum };

enum class Decoration : std::uint32_t {
  kBlock = 2,
  kArrayStride = 6,
  kBuiltIn = 11,
  kOffset = 35,
  kFPRoundingMode = 39,
};

// Functions of GLSL.std.450. NMin and NMax give the number if one operand is NaN.
enum class Function : std::uint32_t {
  kRoundEven = 2,
  kFAbs = 4,
  kSin = 13,
  kCos = 14,
  kPow = 26,
  kExp = 27,
  kLog = 28,
  kSqrt = 31,
  kUMin = 38,
  kSMin = 39,
  kUMax = 41,
  kSMax = 42,
  kUnpackHalf2x16 = 62,
  kNMin = 79,
  kNMax = 80,
};

class Module {
 public:
  // `matrices`: the units for cooperative matrices. They need Vulkan's memory model, in which
  // accesses to a work-group's memory are marked as those that barriers order.
  explicit Module(std::optional<MatrixUnits> matrices = std::nullopt) : matrices_(matrices) {}

  bool has_matrices() const { return matrices_.has_value(); }
  Id matrix_of(Use use);
  Id next() { return bound_++; }

  // Ids of types and constants.
  Id of_void() { return declared(Op::kTypeVoid, {}); }
  Id of_bool() { return declared(Op::kTypeBool, {}); }
  Id of_int(std::uint32_t bits = 32) {
    return declared(Op::kTypeInt, {bits, bits == 32 ? 1U : 0U});
  }
  Id of_uint() { return declared(Op::kTypeInt, {32, 0}); }
  Id of_float(std::uint32_t bits = 32) { return declared(Op::kTypeFloat, {bits}); }
  Id vector_of(Id element, std::uint32_t width) {
    return declared(Op::kTypeVector, {element, width});
  }
  Id array_of(Id element, std::uint32_t count) {
    return declared(Op::kTypeArray, {element, constant(of_uint(), count)});
  }
  Id pointer_to(Class storage, Id type) {
    return declared(Op::kTypePointer, {static_cast<std::uint32_t>(storage), type});
  }
  // A block in memory whose one member is an array, of any length, of elements so many bytes apart.
  Id block_of(Id element, std::uint32_t bytes);
  // A block whose members are at these offsets.
  Id block_of(const std::vector<Id>& members, std::span<const std::uint32_t> offsets);
  Id constant(Id type, std::uint32_t bits) { return declared_value(Op::kConstant, type, {bits}); }

  // A variable outside the function; the shader's interface lists it.
  Id global(Class storage, Id type);
  Id builtin(std::uint32_t which, Id type);
  // A variable of the function, and an instruction that runs before the function's others.
  Id local(Id type);
  Id first(Op op, Id type, std::initializer_list<std::uint32_t> operands);

  // Instructions of the function; the first gives a result.
  Id emit(Op op, Id type, std::initializer_list<std::uint32_t> operands);
  void emit(Op op, std::initializer_list<std::uint32_t> operands);
  Id call(Function function, Id type, std::initializer_list<std::uint32_t> operands);
  void decorate(Id what, Decoration decoration, std::initializer_list<std::uint32_t> operands = {});

  // The instructions that were emitted since; they are put back by append().
  Words taken() { return std::exchange(body_, {}); }
  void put(Words words) { body_ = std::move(words); }
  void append(const Words& words) { body_.insert(body_.end(), words.begin(), words.end()); }

  // The module's bytes: the shader `name` with work-groups of so many lanes.
  std::string bytes(std::string_view name, std::uint32_t lanes);

 private:
  Id declared(Op op, std::initializer_list<std::uint32_t> operands);
  Id declared_value(Op op, Id type, std::initializer_list<std::uint32_t> operands);

  std::optional<MatrixUnits> matrices_;
  Id bound_ = 1;
  Id functions_ = next();
  std::map<Words, Id> known_;
  std::vector<Id> interface_;
  Words decorations_;
  Words declarations_;
  Words locals_;
  Words prologue_;
  Words body_;
};

}  // namespace flownpu::gpu::spirv
