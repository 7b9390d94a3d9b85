// SPDX-License-Identifier: Apache-2.0
// Dialect: the differences between the languages that GPU drivers compile. Each dialect is one
// file, such as opencl_c.cc.
#pragma once

#include <string>
#include <vector>

#include "ops/gpu/language/kernel.h"

namespace flownpu::gpu {

class Dialect {
 public:
  virtual ~Dialect() = default;

  // Source before all kernels: definitions of the words of kernel.h, except those about tensors.
  virtual std::string prelude() const = 0;
  // The whole kernel with that body, in the dialect's language.
  virtual std::string kernel(const KernelDescription& description,
                             const std::string& body) const = 0;
  // A literal with exactly this value.
  virtual std::string number(float value) const = 0;

  // Expressions and statements that access memory. `index` is an expression that counts elements
  // from the tensor's first.
  virtual std::string read(const TensorDescription& tensor, const std::string& index) const = 0;
  virtual std::string read4(const TensorDescription& tensor, const std::string& index) const = 0;
  // Four elements as float4; for int8 rows the codes without their scale. The index of the first is
  // a multiple of 4.
  virtual std::string read_floats(const TensorDescription& tensor,
                                  const std::string& index) const = 0;
  // A statement that writes the variable `value` to the tensor.
  virtual std::string write(const TensorDescription& tensor, const std::string& index) const = 0;
  // A declaration, without a semicolon, of the variable `value`, initialised with the expression
  // `value`; of the type that the tensor's elements have in arithmetic.
  virtual std::string declare_value(const TensorDescription& tensor,
                                    const std::string& value) const = 0;

  // A statement that writes the scale of an int8 row: the variable `value`, which bf16 holds
  // exactly, as a float whose upper half is at `offset`, in bytes.
  virtual std::string write_scale(const TensorDescription& tensor,
                                  const std::string& offset) const = 0;

  // Reads of a Q4NX weight, in either storage; bfloat16() also reads the scale of int8 rows.
  // `offset` counts bytes and is a multiple of the bytes that are read: one bf16; 8 of them; 16
  // bytes; an int8; the 4-bit code of `row`, where `offset` is that of the column in the row's
  // strip of 16 rows. What four_words() reads can be given to the words nibbles() and looked_up().
  // No vector has more than 8 floats, which is what AVX has registers for: LLVM 14 (PoCL 3.0) takes
  // a Zen 4 for a Zen 3, and then ends the process on vectors of 16.
  virtual std::string bfloat16(const TensorDescription& weight,
                               const std::string& offset) const = 0;
  virtual std::string bfloat16s(const TensorDescription& weight,
                                const std::string& offset) const = 0;
  virtual std::string four_words(const TensorDescription& weight,
                                 const std::string& offset) const = 0;
  virtual std::string signed_byte(const TensorDescription& weight,
                                  const std::string& offset) const = 0;
  virtual std::string code(const TensorDescription& weight, const std::string& offset,
                           const std::string& row) const = 0;
};

const Dialect& opencl_c();
// Its source is a SPIR-V module, as bytes (spirv/dialect.cc).
const Dialect& spirv_for_vulkan();

}  // namespace flownpu::gpu
