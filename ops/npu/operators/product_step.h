// SPDX-License-Identifier: Apache-2.0
// ProductStep: a product by itself on the array (match/array_operator.h). What is element by
// element behind it, the host does: bias, gate or activation, residual.
#pragma once

#include <memory>
#include <span>

#include "ops/cpu/step.h"
#include "ops/npu/operators/programs.h"

namespace flownpu::npu {

// `host`: the step of the same node on the host, which computes what is too little to be worth a
// dispatch, and residuals that are broadcast.
std::unique_ptr<Step> make_product_step(const Node& node,
                                        std::unique_ptr<OperatorPrograms> programs,
                                        std::unique_ptr<Step> host, const cpu::Context& context);

}  // namespace flownpu::npu
