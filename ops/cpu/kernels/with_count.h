// SPDX-License-Identifier: Apache-2.0
// Chooses a kernel by its number of rows. Kernels are compiled for each number of rows that fits
// their registers.
#pragma once

#include <cstdint>

namespace flownpu::cpu::FLOWNPU_ISA {
namespace {

// Calls function.template operator()<N>() for a count of 1 .. LARGEST.
template <int LARGEST, typename Function>
void with_count(std::int64_t count, const Function& function) {
  if constexpr (LARGEST > 1) {
    if (count < LARGEST) return with_count<LARGEST - 1>(count, function);
  }
  function.template operator()<LARGEST>();
}

}  // namespace
}  // namespace flownpu::cpu::FLOWNPU_ISA
