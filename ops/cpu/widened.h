// SPDX-License-Identifier: Apache-2.0
// Steps for activations of float16 and bfloat16: they compute in float32, and round the result.
#pragma once

#include <cstddef>
#include <limits>
#include <memory>

#include "ops/cpu/step.h"

namespace flownpu::cpu {

inline constexpr std::size_t kNoInput = std::numeric_limits<std::size_t>::max();

// The step that `make` makes of the node. If inputs or outputs are float16 or bfloat16, `make` gets
// a node of float32, and its step runs on copies. A constant input `kept` stays as it is stored.
std::unique_ptr<Step> make_widened(const Node& node, const Context& context, MakeStep make,
                                   std::size_t kept);

template <MakeStep MAKE, std::size_t KEPT = kNoInput>
std::unique_ptr<Step> widened(const Node& node, const Context& context) {
  return make_widened(node, context, MAKE, KEPT);
}

}  // namespace flownpu::cpu
