// SPDX-License-Identifier: Apache-2.0
// From the nodes of a partition to its program.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ep/options.h"
#include "ep/program/resilient_program.h"
#include "ops/device.h"
#include "ops/nodes/node.h"

namespace flownpu {

struct CompiledPartition {
  std::unique_ptr<ResilientProgram> program;
  // What the device's lowering said (ops/device.h), for the placement report.
  std::vector<Lowered::OnHost> on_host;
  std::string summary;
  // For one token.
  std::int64_t multiply_adds = 0;
  // Program::why_whole().
  std::string why_whole;
};

// Is shown the lowered nodes, constants and all.
using KeepNodes = std::function<void(const std::vector<Node>&)>;

// `nodes` in topological order; `inputs`: names of the values that enter the partition. Throws
// Error if `on_unsupported` is error and the device leaves operators to its host, or if a node
// cannot be prepared; but where only the device cannot, and `on_unsupported` says so, the program
// is the CPU's, and `on_host` has the reason. `keep` may be empty.
CompiledPartition compile_partition(const std::shared_ptr<const Device>& device,
                                    const Options& options, std::vector<Node> nodes,
                                    const std::vector<std::string>& inputs,
                                    const Lowering& lowering, const KeepNodes& keep);

}  // namespace flownpu
