// SPDX-License-Identifier: Apache-2.0
// The schema of Q4NXMoE; ops/definitions/q4nx_moe.py has the equations. E = num_experts,
// D = hidden_size, I = expert_size.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "ops/nodes/contract.h"
#include "ops/nodes/q4nx_matmul.h"

namespace flownpu {

inline constexpr Port kMoePorts[] = {
    {.name = "X", .types = kFloat, .shape = "[..,?]", .meaning = "[.., D]"},
    optional({.name = "router",
              .types = {DataType::kFloat32, DataType::kBFloat16},
              .shape = "[?,?]",
              .constant = true,
              .meaning = "[E, D], whose product with X gives the logits"}),
    q4nx_blocks("gate_up",
                "Q4NX blocks of each expert's gate [I, D] and then its up projection [I, D]"),
    q4nx_blocks("down", "Q4NX blocks of each expert's down projection [D, I]"),
    optional({.name = "router_logits",
              .types = kFloat,
              .shape = "[..,?]",
              .meaning = "[.., E] or [rows of X, E], instead of a router: logits that another "
                         "node computes"}),
    optional({.name = "router_bias",
              .types = {DataType::kFloat32},
              .shape = "[?]",
              .constant = true,
              .meaning = "[E], added to sigmoid(logits) to choose experts"}),
    optional({.name = "gate_up_bias",
              .types = {DataType::kFloat32},
              .shape = "[?,?]",
              .constant = true,
              .meaning = "[E, 2 I], added to each expert's gate [I] and its up projection [I]"}),
    optional({.name = "down_bias",
              .types = {DataType::kFloat32},
              .shape = "[?,?]",
              .constant = true,
              .meaning = "[E, D], added to each expert's answer"}),
    optional({.name = "logits_bias",
              .types = {DataType::kFloat32},
              .shape = "[?]",
              .constant = true,
              .meaning = "[E], added to the logits of a router"}),
    optional({.name = "expert_scales",
              .types = {DataType::kFloat32},
              .shape = "[?]",
              .constant = true,
              .meaning = "[E], factors of the experts' answers"}),
};
inline constexpr Port kMoeResult[] = {{.name = "Y", .types = kFloat, .meaning = "[.., D]"}};
inline constexpr AttributeRule kMoeAttributes[] = {
    required(count("num_experts", 1), "E"),
    required(count("experts_per_token", 1), "experts that each row chooses"),
    required(count("hidden_size", 1), "D"),
    required(count("expert_size", 1), "I"),
    optional(flag("normalize_routing_weights"), std::int64_t{1},
             "1: the softmax is over the chosen experts' logits; 0: over all"),
    optional(text("gating", "swiglu|geglu"), std::string_view("swiglu"),
             "the activation of the gates"),
    optional(number("swiglu_alpha"), 1.0F, "a of swiglu: gate sigmoid(a gate) (up + b)"),
    optional(number("swiglu_beta"), 0.0F, "b of swiglu"),
    optional(number("swiglu_limit", 0), 0.0F,
             "the largest gate of swiglu, and the largest size of an up projection; 0: none"),
};
inline constexpr Contract kQ4nxMoe{kDomain, "Q4NXMoE", 1, 1, kMoePorts, kMoeResult, kMoeAttributes};

enum MoeInput : std::uint8_t {
  kMoeX = position(kMoePorts, "X"),
  kMoeRouter = position(kMoePorts, "router"),
  kMoeGateUp = position(kMoePorts, "gate_up"),
  kMoeDown = position(kMoePorts, "down"),
  kMoeLogits = position(kMoePorts, "router_logits"),
  kMoeBias = position(kMoePorts, "router_bias"),
  kMoeGateUpBias = position(kMoePorts, "gate_up_bias"),
  kMoeDownBias = position(kMoePorts, "down_bias"),
  kMoeLogitsBias = position(kMoePorts, "logits_bias"),
  kMoeScales = position(kMoePorts, "expert_scales"),
};

// The input or attribute by which a mixture is more than a router without a bias and experts
// down(act(gate) * up); empty: there is none.
std::string special_experts(const Node& node);

}  // namespace flownpu
