// SPDX-License-Identifier: Apache-2.0
// Compiler: instructions of a kernel's text, which is what generate() makes for the dialect spirv()
// (dialect.cc). It reads the text once and emits as it reads; loops read their step again behind
// their body, and the language's own functions (words.h) are read again at each call.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "ops/gpu/language/spirv/arithmetic.h"
#include "ops/gpu/language/spirv/memory.h"
#include "ops/gpu/language/spirv/module.h"
#include "ops/gpu/language/spirv/tokens.h"

namespace flownpu::gpu::spirv {

class Compiler {
 public:
  // `tensors`, `parameters`: the names of the kernel's arguments.
  Compiler(const std::vector<std::string>& tensors, const std::vector<std::string>& parameters,
           std::optional<MatrixUnits> matrices);

  // Throws Error, with the words where it stopped, for a text that the language does not have.
  // `functions`: definitions of functions that the kernel may call.
  void compile(std::string_view functions, std::string_view body);
  std::string bytes(std::string_view name, std::uint32_t lanes) {
    return module_.bytes(name, lanes);
  }

 private:
  struct Declared {
    Type type;
    std::vector<std::pair<Type, std::string>> parameters = {};
    std::size_t body = 0;  // its first token
  };
  using Symbol = std::variant<Value, Place, TensorName, Declared>;
  // The value or the place that an expression names; a place is loaded when its value is wanted.
  using Named = std::variant<Value, Place>;

  const Token& token() const { return tokens_[at_]; }
  bool is(std::string_view text) const { return token().text == text; }
  bool take(std::string_view text);
  void expect(std::string_view text);
  std::string name();
  void skip_to_closing();
  bool begins_type() const;
  Type type();

  Symbol& find(const std::string& name);
  void declare(const std::string& name, Symbol symbol) {
    scopes_.back().insert_or_assign(name, std::move(symbol));
  }

  // Statements.
  void declare_functions();
  void statement();
  void block();
  void declaration();
  void declare_one(Type type, bool is_const, bool is_shared);
  void declare_array(const std::string& name, Type type, bool is_shared);
  void assignment();
  void change_by_one(const Place& place, std::string_view sign);
  void conditional();
  void loop(bool is_unrolled);

  // Expressions.
  Value expression();
  Value binary(std::size_t level);
  Value unary();
  Named postfix();
  Named primary();
  Value number();
  Value cast(Type type);
  Place shared_cast();
  Named component_of(const Named& named, const std::string& components);
  Value choice(const Value& condition);
  Value value_of(const Named& named);
  std::vector<Value> arguments();

  // Functions.
  Named call(const std::string& name);
  Value call_declared(const Declared& function, const std::vector<Value>& given);
  bool call_memory(const std::string& name, Value& result);
  bool call_statement(const std::string& name);
  Value call_builtin(const std::string& name, const std::vector<Value>& given);
  Value call_conversion(std::string_view name, const Value& given);
  Value looked_up(const Value& table, const Value& places);
  // Words about matrices (matrices.cc).
  bool call_matrix(const std::string& name, Value& result);
  void store_matrix();
  Id element_of_array();
  Value call_of_matrices(const std::string& name, const std::vector<Value>& given);
  Value dot4(const Value& a, const Value& b, const Value& c);

  void begin_block(Id label);
  void branch(Id to);

  Module module_;
  Arithmetic arithmetic_{module_};
  Memory memory_;
  std::vector<Token> tokens_;
  std::size_t at_ = 0;
  std::vector<std::map<std::string, Symbol>> scopes_;
  // Counts what cannot be done in vain: reads and writes of tensors, barriers, branches.
  std::int64_t effects_ = 0;
  Id block_ = 0;  // the label of the current block; 0: the function's first
  Id group_ = 0;
  Id lane_ = 0;
  Id subgroup_ = 0;  // 0: not read yet
};

// The type that a name such as float8 means, or none.
bool is_type(std::string_view name);
Type type_of(std::string_view name);

}  // namespace flownpu::gpu::spirv
