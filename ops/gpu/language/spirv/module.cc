// SPDX-License-Identifier: Apache-2.0
#include "ops/gpu/language/spirv/module.h"

#include <cstring>
#include <utility>

#include "ops/error.h"

namespace flownpu::gpu::spirv {
namespace {

constexpr std::uint32_t kMagic = 0x07230203;
constexpr std::uint32_t kVersion = 0x00010600;
// Capabilities: Shader, Float16, Int16, Int8, StorageBuffer16BitAccess, StorageBuffer8BitAccess,
// SignedZeroInfNanPreserve, PhysicalStorageBufferAddresses, DotProductInput4x8BitPacked,
// DotProduct. Numbers of 8 and 16 bits are only loaded, stored and converted, but pointers to them
// are converted, too, which needs the first three.
constexpr std::uint32_t kCapabilities[] = {1, 9, 22, 39, 4433, 4448, 4466, 5347, 6018, 6019};
// GroupNonUniform, VulkanMemoryModel, CooperativeMatrixKHR.
constexpr std::uint32_t kMatrixCapabilities[] = {61, 5345, 6022};
constexpr std::uint32_t kSubgroupScope = 3;
constexpr std::uint32_t kVulkan = 3;  // a memory model
constexpr std::uint32_t kPhysicalStorageBuffer64 = 5348;
constexpr std::uint32_t kGlsl450 = 1;
constexpr std::uint32_t kGlCompute = 5;
constexpr std::uint32_t kLocalSize = 17;
constexpr std::uint32_t kSignedZeroInfNanPreserve = 4461;

void write(Words& into, Op op, std::span<const std::uint32_t> operands) {
  const auto words = static_cast<std::uint32_t>(operands.size() + 1);
  into.push_back((words << 16U) | static_cast<std::uint32_t>(op));
  into.insert(into.end(), operands.begin(), operands.end());
}

void write(Words& into, Op op, std::initializer_list<std::uint32_t> operands) {
  write(into, op, std::span(operands.begin(), operands.size()));
}

// A string as words, with the zero that ends it.
void add_text(Words& words, std::string_view text) {
  const std::size_t at = words.size();
  words.resize(at + text.size() / 4 + 1);
  std::memcpy(words.data() + at, text.data(), text.size());
}

}  // namespace

Id Module::declared(Op op, std::initializer_list<std::uint32_t> operands) {
  Words key{static_cast<std::uint32_t>(op)};
  key.insert(key.end(), operands);
  if (const auto found = known_.find(key); found != known_.end()) return found->second;
  const Id id = next();
  known_.emplace(key, id);
  key.front() = id;
  write(declarations_, op, key);
  return id;
}

Id Module::declared_value(Op op, Id type, std::initializer_list<std::uint32_t> operands) {
  Words key{static_cast<std::uint32_t>(op), type};
  key.insert(key.end(), operands);
  if (const auto found = known_.find(key); found != known_.end()) return found->second;
  const Id id = next();
  known_.emplace(key, id);
  key[0] = type;
  key[1] = id;
  write(declarations_, op, key);
  return id;
}

Id Module::matrix_of(Use use) {
  if (!matrices_) fail("expected a kernel with matrix units for words about matrices");
  const std::int64_t rows = use == Use::kRight ? matrices_->depth : matrices_->rows;
  const std::int64_t columns = use == Use::kLeft ? matrices_->depth : matrices_->columns;
  const auto number = [&](std::int64_t of) {
    return constant(of_uint(), static_cast<std::uint32_t>(of));
  };
  return declared(Op::kTypeCooperativeMatrix,
                  {of_float(use == Use::kSum ? 32 : 16), number(kSubgroupScope), number(rows),
                   number(columns), number(static_cast<std::int64_t>(use))});
}

Id Module::block_of(Id element, std::uint32_t bytes) {
  const bool is_known =
      known_.contains({static_cast<std::uint32_t>(Op::kTypeRuntimeArray), element});
  const Id array = declared(Op::kTypeRuntimeArray, {element});
  const Id block = declared(Op::kTypeStruct, {array});
  if (!is_known) {
    decorate(array, Decoration::kArrayStride, {bytes});
    decorate(block, Decoration::kBlock);
    write(decorations_, Op::kMemberDecorate,
          {block, 0, static_cast<std::uint32_t>(Decoration::kOffset), 0});
  }
  return block;
}

Id Module::block_of(const std::vector<Id>& members, std::span<const std::uint32_t> offsets) {
  const Id block = next();
  Words words{block};
  words.insert(words.end(), members.begin(), members.end());
  write(declarations_, Op::kTypeStruct, words);
  decorate(block, Decoration::kBlock);
  for (std::uint32_t member = 0; member < offsets.size(); ++member)
    write(decorations_, Op::kMemberDecorate,
          {block, member, static_cast<std::uint32_t>(Decoration::kOffset), offsets[member]});
  return block;
}

Id Module::global(Class storage, Id type) {
  const Id pointer = pointer_to(storage, type);
  const Id id = next();
  write(declarations_, Op::kVariable, {pointer, id, static_cast<std::uint32_t>(storage)});
  interface_.push_back(id);
  return id;
}

Id Module::builtin(std::uint32_t which, Id type) {
  const Id id = global(Class::kInput, type);
  decorate(id, Decoration::kBuiltIn, {which});
  return id;
}

Id Module::local(Id type) {
  const Id pointer = pointer_to(Class::kFunction, type);
  const Id id = next();
  write(locals_, Op::kVariable, {pointer, id, static_cast<std::uint32_t>(Class::kFunction)});
  return id;
}

Id Module::first(Op op, Id type, std::initializer_list<std::uint32_t> operands) {
  std::swap(body_, prologue_);
  const Id id = emit(op, type, operands);
  std::swap(body_, prologue_);
  return id;
}

Id Module::emit(Op op, Id type, std::initializer_list<std::uint32_t> operands) {
  const Id id = next();
  Words words{type, id};
  words.insert(words.end(), operands);
  write(body_, op, words);
  return id;
}

void Module::emit(Op op, std::initializer_list<std::uint32_t> operands) {
  write(body_, op, operands);
}

Id Module::call(Function function, Id type, std::initializer_list<std::uint32_t> operands) {
  const Id id = next();
  Words words{type, id, functions_, static_cast<std::uint32_t>(function)};
  words.insert(words.end(), operands);
  write(body_, Op::kExtInst, words);
  return id;
}

void Module::decorate(Id what, Decoration decoration,
                      std::initializer_list<std::uint32_t> operands) {
  Words words{what, static_cast<std::uint32_t>(decoration)};
  words.insert(words.end(), operands);
  write(decorations_, Op::kDecorate, words);
}

std::string Module::bytes(std::string_view name, std::uint32_t lanes) {
  const Id of_main = declared(Op::kTypeFunction, {of_void()});
  const Id shader = next();
  const Id label = next();
  Words all{kMagic, kVersion, 0, 0, 0};
  for (const std::uint32_t capability : kCapabilities) write(all, Op::kCapability, {capability});
  if (has_matrices()) {
    for (const std::uint32_t capability : kMatrixCapabilities)
      write(all, Op::kCapability, {capability});
    Words extension;
    add_text(extension, "SPV_KHR_cooperative_matrix");
    write(all, Op::kExtension, extension);
  }
  Words import{functions_};
  add_text(import, "GLSL.std.450");
  write(all, Op::kExtInstImport, import);
  write(all, Op::kMemoryModel, {kPhysicalStorageBuffer64, has_matrices() ? kVulkan : kGlsl450});
  Words entry{kGlCompute, shader};
  add_text(entry, name);
  entry.insert(entry.end(), interface_.begin(), interface_.end());
  write(all, Op::kEntryPoint, entry);
  write(all, Op::kExecutionMode, {shader, kLocalSize, lanes, 1, 1});
  write(all, Op::kExecutionMode, {shader, kSignedZeroInfNanPreserve, 32});
  const auto add = [&](const Words& words) { all.insert(all.end(), words.begin(), words.end()); };
  add(decorations_);
  add(declarations_);
  write(all, Op::kFunction, {of_void(), shader, 0, of_main});
  write(all, Op::kLabel, {label});
  add(locals_);
  add(prologue_);
  add(body_);
  write(all, Op::kReturn, {});
  write(all, Op::kFunctionEnd, {});
  all[3] = bound_;
  return {reinterpret_cast<const char*>(all.data()), all.size() * sizeof(all.front())};
}

}  // namespace flownpu::gpu::spirv
