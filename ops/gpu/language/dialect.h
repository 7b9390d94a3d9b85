// SPDX-License-Identifier: Apache-2.0
// Dialect: what differs between languages that GPUs' drivers take. One is one file: opencl_c.cc.
#pragma once

#include <string>
#include <vector>

#include "ops/gpu/language/kernel.h"

namespace flownpu::gpu {

class Dialect {
 public:
  virtual ~Dialect() = default;

  // What stands before all kernels: the words of kernel.h that are no tensors.
  virtual std::string prelude() const = 0;
  // The kernel, of the dialect's body.
  virtual std::string kernel(const KernelDescription& description,
                             const std::string& body) const = 0;
  virtual std::string number(float value) const = 0;

  // Physical places: `index` counts elements from the tensor's first.
  virtual std::string read(const TensorDescription& tensor, const std::string& index) const = 0;
  virtual std::string read4(const TensorDescription& tensor, const std::string& index) const = 0;
  // Four elements as float4, of int8 rows the codes; the first is at a multiple of their size.
  virtual std::string read_floats(const TensorDescription& tensor,
                                  const std::string& index) const = 0;
  // A statement that writes the variable `value`.
  virtual std::string write(const TensorDescription& tensor, const std::string& index) const = 0;
  // The declaration of `value`, of that tensor's elements, without a semicolon.
  virtual std::string declare_value(const TensorDescription& tensor,
                                    const std::string& value) const = 0;

  // A statement that writes the variable `value`, which bf16 holds, as a float whose upper half is
  // at this offset in bytes.
  virtual std::string write_scale(const TensorDescription& tensor,
                                  const std::string& offset) const = 0;

  // A Q4NX weight's, in either storage, the first of int8 rows', too; `offset` counts bytes, and is
  // a multiple of those that are read. One bf16; 8 of them; 16 bytes; the code of `row`, `offset`
  // being that of its strip's 16 rows of the column. 8 floats are what AVX has registers for: where
  // LLVM 14 (PoCL 3.0) takes a Zen 4 for a Zen 3, it ends the process on vectors of 16.
  virtual std::string bfloat16(const TensorDescription& weight,
                               const std::string& offset) const = 0;
  virtual std::string bfloat16s(const TensorDescription& weight,
                                const std::string& offset) const = 0;
  virtual std::string code_pairs(const TensorDescription& weight,
                                 const std::string& offset) const = 0;
  virtual std::string code(const TensorDescription& weight, const std::string& offset,
                           const std::string& row) const = 0;
};

const Dialect& opencl_c();

}  // namespace flownpu::gpu
