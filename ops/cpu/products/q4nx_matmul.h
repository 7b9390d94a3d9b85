// SPDX-License-Identifier: Apache-2.0
// Q4NXMatMul on the CPU. FusedDQP is Q4NXMatMul of one row.
#pragma once

#include <memory>

#include "ops/cpu/step.h"
#include "ops/formats/q4nx.h"

namespace flownpu::cpu {

// Throws Error if W is not a constant Q4NX weight of the shape that M, K and gating imply.
std::unique_ptr<Step> make_q4nx_matmul(const Node& node, const Context& context);
// Like make_q4nx_matmul, but its step throws Error for more than one row.
std::unique_ptr<Step> make_fused_dqp(const Node& node, const Context& context);
// Its step throws Error for an index outside of [0, M).
std::unique_ptr<Step> make_q4nx_gather(const Node& node, const Context& context);

// The layout of an input that is a constant Q4NX weight of `row_blocks` rows of blocks and k
// columns; throws Error if its shape is none of such a weight.
q4nx::Layout q4nx_layout(const Node& node, std::size_t input, std::int64_t row_blocks,
                         std::int64_t k);

}  // namespace flownpu::cpu
