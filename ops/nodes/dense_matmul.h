// SPDX-License-Identifier: Apache-2.0
// The schema of DenseMatMul; ops/definitions/dense_matmul.py has the equation.
#pragma once

#include <cstdint>
#include <string_view>

#include "ops/nodes/contract.h"

namespace flownpu {

inline constexpr Port kDensePorts[] = {
    {.name = "X", .types = kFloat, .shape = "[..,?]", .meaning = "[.., K]"},
    {.name = "W",
     .types = {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16, DataType::kInt8},
     .shape = "[?,?]",
     .meaning = "[K, M], with transposed [M, K]"},
    optional({.name = "scale",
              .types = kFloat,
              .shape = "[..,M]",
              .meaning = "[M], of each column of the result, for a weight of int8"}),
    optional({.name = "bias", .types = kFloat, .shape = "[..,M]", .meaning = "[M]"}),
    optional({.name = "residual",
              .types = kFloat,
              .meaning = "added to the result, with which it broadcasts"}),
};
inline constexpr Port kDenseResult[] = {{.name = "Y", .types = kFloat, .meaning = "[.., M]"}};
inline constexpr AttributeRule kDenseAttributes[] = {
    optional(text("activation", "none|gelu|gelu_tanh"), std::string_view("none"),
             "the function of the product with its bias"),
    optional(flag("transposed"), std::int64_t{0}, "1: W is [M, K]"),
};
inline constexpr Contract kDenseMatMul{kDomain,      "DenseMatMul",   1, 1, kDensePorts,
                                       kDenseResult, kDenseAttributes};

enum DenseInput : std::uint8_t {
  kDenseX = position(kDensePorts, "X"),
  kDenseWeight = position(kDensePorts, "W"),
  kDenseScale = position(kDensePorts, "scale"),
  kDenseBias = position(kDensePorts, "bias"),
  kDenseResidual = position(kDensePorts, "residual"),
};

}  // namespace flownpu
