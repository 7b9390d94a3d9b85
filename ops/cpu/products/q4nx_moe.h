// SPDX-License-Identifier: Apache-2.0
// Q4NXMoE on the CPU. Another device may compute the experts.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "ops/cpu/products/expert_rows.h"
#include "ops/cpu/step.h"

namespace flownpu::cpu {

// Products of experts on another device than the CPU.
class ExpertProducts {
 public:
  virtual ~ExpertProducts() = default;

  // Whether these choices are worth computing there; if not, the CPU computes them.
  virtual bool takes(const RowsByExpert& by_expert) const = 0;
  // answers[place][D] = (act(gate . x) * (up . x)) . down, for the expert and the row x[D] of each
  // place; x: all rows, [rows][D].
  virtual void answer(const float* x, const RowsByExpert& by_expert, float* answers) const = 0;
};

// The places of experts' weights in memory. Without a value they follow one another as in the
// graph.
struct ExpertPlaces {
  // Bytes from the weights of one expert to those of the next: gate and up projections, and down.
  std::int64_t gate_up = 0;
  std::int64_t down = 0;
  // Whether each of the gate's rows of blocks is followed by the up projection's, not all of them.
  bool in_turns = false;
};

// `elsewhere`: null if there is no such device. Throws Error as the operator's own step does.
std::unique_ptr<Step> make_q4nx_moe(const Node& node, const Context& context,
                                    std::unique_ptr<ExpertProducts> elsewhere,
                                    const std::optional<ExpertPlaces>& places = std::nullopt);

}  // namespace flownpu::cpu
