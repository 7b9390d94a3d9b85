// SPDX-License-Identifier: Apache-2.0
// Steps of operators by themselves on the array (match/array_operator.h). The host computes runs
// that are too small to be worth their dispatches. `node`: one that is on the array.
#pragma once

#include <functional>
#include <memory>

#include "ops/cpu/step.h"
#include "ops/npu/operators/programs.h"

namespace flownpu::npu {

// Attention: the host prepares queries, keys and values (norms and rotations of heads, the KV
// cache), the array attends. The host also computes calls with more keys than the programs'
// context, or with a mask that the array does not support.
std::unique_ptr<Step> make_attention_step(const Node& node,
                                          std::unique_ptr<OperatorPrograms> programs,
                                          const cpu::Context& context);

// A product. The host computes what follows it element by element: bias, gate or activation,
// residual. `host`: the step of the same node on the host, also for residuals that are broadcast.
std::unique_ptr<Step> make_product_step(const Node& node,
                                        std::unique_ptr<OperatorPrograms> programs,
                                        std::unique_ptr<Step> host, const cpu::Context& context);

// A convolution. The host lays out pictures channels-last, reads planes back, and adds what
// follows.
std::unique_ptr<Step> make_convolution_step(const Node& node,
                                            std::unique_ptr<OperatorPrograms> programs,
                                            std::unique_ptr<Step> host,
                                            const cpu::Context& context);

// The products of a Q4NXMoE, expert by expert, each with the rows that chose it. The host computes
// routing, activations and sums. `programs_of`: makes the programs of an expert's product.
std::unique_ptr<Step> make_mixture_step(
    const Node& node,
    const std::function<std::unique_ptr<OperatorPrograms>(const Node&)>& programs_of,
    const cpu::Context& context);

}  // namespace flownpu::npu
