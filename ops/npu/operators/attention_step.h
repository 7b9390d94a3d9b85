// SPDX-License-Identifier: Apache-2.0
// AttentionStep: attention by itself on the array (match/array_operator.h). The host prepares what
// is multiplied (norms and rotations of heads, the KV cache), the array attends.
#pragma once

#include <memory>

#include "ops/cpu/step.h"
#include "ops/npu/operators/programs.h"

namespace flownpu::npu {

// Calls that are too little to be worth their dispatches, have more keys than the programs'
// context, or a mask that the array has none of, are computed by the host.
std::unique_ptr<Step> make_attention_step(const Node& node,
                                          std::unique_ptr<OperatorPrograms> programs,
                                          const cpu::Context& context);

}  // namespace flownpu::npu
