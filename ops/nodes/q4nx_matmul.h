// SPDX-License-Identifier: Apache-2.0
// The schemas of Q4NXMatMul, FusedDQP and Q4NXGather, whose weight [M, K] is in Q4NX blocks;
// ops/definitions/<operator>.py has the equations.
#pragma once

#include <cstdint>
#include <string_view>

#include "ops/nodes/contract.h"

namespace flownpu {

inline constexpr std::string_view kQ4nxBlocks =
    "[row blocks, column blocks, bytes of a block], Q4NX blocks of [M, K] in any layout";

// An input of Q4NX blocks.
constexpr Port q4nx_blocks(std::string_view name, std::string_view meaning) {
  return {.name = name, .types = kUInt8, .shape = "[?,?,?]", .constant = true, .meaning = meaning};
}

inline constexpr Port kProductPorts[] = {
    {.name = "X", .types = kFloat, .shape = "[..,K]", .meaning = "[.., K]"},
    q4nx_blocks("W",
                "[row blocks, column blocks, bytes of a block], Q4NX blocks of [M, K] in any "
                "layout; with gating the gate's and below them the up projection's"),
    optional(
        {.name = "bias", .types = kFloat, .shape = "[..,M]", .meaning = "[M], not with gating"}),
    optional({.name = "residual",
              .types = kFloat,
              .shape = "[..,M]",
              .meaning = "[.., M], added to the result"}),
};
inline constexpr Port kProductResult[] = {{.name = "Y", .types = kFloat, .meaning = "[.., M]"}};
inline constexpr AttributeRule kProductAttributes[] = {
    required(count("M", 1), "rows of the weight"),
    required(count("K", 1), "columns of the weight"),
    optional(text("gating", "none|geglu|swiglu"), std::string_view("none"),
             "the activation of the gate: Y = act(X gate^T) * (X up^T) (+ residual)"),
};

inline constexpr Port kGatherPorts[] = {
    q4nx_blocks("W", kQ4nxBlocks),
    {.name = "indices", .types = kIntegers, .meaning = "[..], each in 0..M-1"},
};
inline constexpr Port kGatherResult[] = {{.name = "Y", .types = kFloat, .meaning = "[.., K]"}};
inline constexpr AttributeRule kGatherAttributes[] = {
    required(count("M", 1), "rows of the table"), required(count("K", 1), "columns of the table")};

inline constexpr Contract kQ4nxMatMul{kDomain,        "Q4NXMatMul",      1, 1, kProductPorts,
                                      kProductResult, kProductAttributes};
inline constexpr Contract kFusedDqp{kDomain,        "FusedDQP",        1, 1, kProductPorts,
                                    kProductResult, kProductAttributes};
inline constexpr Contract kQ4nxGather{kDomain,       "Q4NXGather",     1, 1, kGatherPorts,
                                      kGatherResult, kGatherAttributes};

enum ProductInput : std::uint8_t {
  kProductX = position(kProductPorts, "X"),
  kProductWeight = position(kProductPorts, "W"),
  kProductBias = position(kProductPorts, "bias"),
  kProductResidual = position(kProductPorts, "residual"),
};

}  // namespace flownpu
