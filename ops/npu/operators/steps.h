// SPDX-License-Identifier: Apache-2.0
// Steps of operators by themselves on the array (match/array_operator.h). Runs that are too little
// to be worth their dispatches are the host's. `node`: that is on the array.
#pragma once

#include <functional>
#include <memory>

#include "ops/cpu/step.h"
#include "ops/npu/operators/programs.h"

namespace flownpu::npu {

// The host prepares what is multiplied (norms and rotations of heads, the KV cache), the array
// attends. Calls with more keys than the programs' context, or a mask that the array has none of,
// are the host's, too.
std::unique_ptr<Step> make_attention_step(const Node& node,
                                          std::unique_ptr<OperatorPrograms> programs,
                                          const cpu::Context& context);

// A product; what is element by element behind it, the host does: bias, gate or activation,
// residual. `host`: the step of the same node on the host, for residuals that are broadcast, too.
std::unique_ptr<Step> make_product_step(const Node& node,
                                        std::unique_ptr<OperatorPrograms> programs,
                                        std::unique_ptr<Step> host, const cpu::Context& context);

// The products of a Q4NXMoE, expert by expert with the rows that chose it. Routing, activations and
// sums are the host's. `programs_of`: makes the programs of an expert's product.
std::unique_ptr<Step> make_mixture_step(
    const Node& node,
    const std::function<std::unique_ptr<OperatorPrograms>(const Node&)>& programs_of,
    const cpu::Context& context);

}  // namespace flownpu::npu
