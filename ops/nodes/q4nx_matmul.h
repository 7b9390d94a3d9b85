// SPDX-License-Identifier: Apache-2.0
// Where inputs of Q4NXMatMul and FusedDQP stand; ops/definitions/q4nx_matmul.py says what they
// mean, ops/cpu/products/q4nx_matmul.cc that these are its names in its order.
#pragma once

#include <cstdint>

namespace flownpu {

enum ProductInput : std::uint8_t {
  kProductX,
  kProductWeight,
  kProductBias,
  kProductResidual,
  kProductInputs,
};

}  // namespace flownpu
