// SPDX-License-Identifier: Apache-2.0
// The products of a Q4NXMoE on the array, expert by expert with the rows that chose it. Routing,
// activations and sums are the host's, and so are runs of too few rows, as a token's are.
#pragma once

#include <functional>
#include <memory>

#include "ops/cpu/step.h"
#include "ops/npu/operators/programs.h"

namespace flownpu::npu {

// `node`: on the array; `programs_of`: makes the programs of an expert's product.
std::unique_ptr<Step> make_mixture_step(
    const Node& node,
    const std::function<std::unique_ptr<OperatorPrograms>(const Node&)>& programs_of,
    const cpu::Context& context);

}  // namespace flownpu::npu
