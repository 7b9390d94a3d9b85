// SPDX-License-Identifier: Apache-2.0
// The kernel's arguments in memory. The shader gets one number as a push constant, the address of a
// block with the addresses of the tensors, 8 bytes each, and behind them the parameters, 4 bytes
// each. So a launch that was recorded gets new arguments by a write to that block, and no number of
// them is too large.
#pragma once

#include <cstdint>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include "ops/gpu/language/spirv/arithmetic.h"

namespace flownpu::gpu::spirv {

class Memory {
 public:
  Memory(Module& module, Arithmetic& arithmetic, std::size_t tensors, std::size_t parameters);

  // The value of the parameter with this number.
  Value parameter(std::uint32_t number);

  // Elements of a tensor: one, or as many as `type` is wide, from the element `index` on. `format`
  // is float32, float16, bfloat16, int32, int8, uint8 or uint32.
  Value load(TensorName tensor, std::string_view format, const Value& index, int width);
  void store(TensorName tensor, std::string_view format, const Value& index, const Value& value);

 private:
  // A pointer to the tensor's element, which as a vector of `width` has the index `at`.
  Id place(TensorName tensor, Id element, std::uint32_t bytes, Id at);

  Module& module_;
  Arithmetic& arithmetic_;
  std::vector<Id> members_;
  std::size_t tensors_;
  Id arguments_ = 0;
  std::map<std::uint32_t, Id> addresses_;
  std::map<std::pair<std::uint32_t, Id>, Id> bases_;  // by tensor and block
};

}  // namespace flownpu::gpu::spirv
