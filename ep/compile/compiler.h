// SPDX-License-Identifier: Apache-2.0
// Compiles the nodes of a partition into a plan.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ep/options.h"
#include "ep/partition/plan_with_fallback.h"
#include "ops/device.h"
#include "ops/nodes/node.h"

namespace flownpu {

struct CompiledPartition {
  std::unique_ptr<PlanWithFallback> plan;
  // Lowered::on_host and Lowered::summary (ops/device.h), for the placement report.
  std::vector<Lowered::OnHost> on_host;
  std::string summary;
  // Multiply-adds for one token.
  std::int64_t multiply_adds = 0;
  // ExecutionPlan::why_whole()
  std::string why_whole;
};

// Called with the lowered nodes, including their constants.
using KeepNodes = std::function<void(const std::vector<Node>&)>;

// `nodes` in topological order; `inputs`: names of the values that enter the partition. Throws
// Error if `on_unsupported` is error and the device leaves operators to its host, or if a node
// cannot be prepared. If the device fails while it prepares nodes, and `on_unsupported` is not
// error, the plan is the CPU's, and `on_host` has the reason. `keep` may be empty.
CompiledPartition compile_partition(const std::shared_ptr<const Device>& device,
                                    const Options& options, std::vector<Node> nodes,
                                    const std::vector<std::string>& inputs,
                                    const Lowering& lowering, const KeepNodes& keep);

}  // namespace flownpu
