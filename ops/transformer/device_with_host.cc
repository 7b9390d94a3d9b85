// SPDX-License-Identifier: Apache-2.0
#include "ops/transformer/device_with_host.h"

#include <algorithm>
#include <utility>

#include "ops/error.h"

namespace flownpu::transformer {

Lowered DeviceWithHost::lower(std::vector<Node> nodes, const Lowering& lowering) const {
  const auto is_one = [this](const Node& node) { return is_own(node); };
  Lowered exported = host_->lower(std::move(nodes), lowering);
  const bool before = std::ranges::any_of(exported.nodes, is_one);
  if (!before && !lowering.obstacle.empty()) {
    exported.on_host = left_on_host(exported.nodes, lowering.obstacle);
    return exported;
  }
  Lowered lowered = before ? exported : lower_own(exported.nodes, lowering.outputs);
  if (!before && !exported.summary.empty())
    lowered.summary = exported.summary + (lowered.summary.empty() ? "" : "; ") + lowered.summary;
  if (std::ranges::none_of(lowered.nodes, is_one)) return lowered;
  try {
    if (!lowered.summary.empty()) lowered.summary += "; ";
    lowered.summary += describe(lowered.nodes, lowering.model_folder);
  } catch (const Error& error) {
    if (before) throw;  // No other device can compute it.
    exported.on_host = left_on_host(exported.nodes, error.what());
    return exported;
  }
  return lowered;
}

}  // namespace flownpu::transformer
