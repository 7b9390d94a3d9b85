// SPDX-License-Identifier: Apache-2.0
#include "ops/nodes/q4nx_moe.h"

#include <array>
#include <utility>

namespace flownpu {

std::string special_experts(const Node& node) {
  for (const MoeInput input : {kMoeGateUpBias, kMoeDownBias, kMoeLogitsBias, kMoeScales})
    if (node.input(input) != nullptr) return std::string(kMoePorts[input].name);
  for (const char* name : {"swiglu_alpha", "swiglu_beta", "swiglu_limit"}) {
    const auto usual = fallback_of<float>(kMoeAttributes, name);
    if (node.number(name, usual) != usual) return name;
  }
  return {};
}

}  // namespace flownpu
