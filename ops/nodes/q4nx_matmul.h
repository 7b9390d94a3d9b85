// SPDX-License-Identifier: Apache-2.0
// The positions of the inputs of Q4NXMatMul and FusedDQP. ops/definitions/q4nx_matmul.py says what
// they mean; the contracts in ops/cpu/products/q4nx_matmul.cc list the same names in this order.
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
