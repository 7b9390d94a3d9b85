// SPDX-License-Identifier: Apache-2.0
// Schedule: which steps of a partition are run slice by slice when a prompt is long.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <unordered_set>
#include <vector>

#include "ops/device.h"
#include "ops/nodes/node.h"

namespace flownpu {

// The order in which steps are run: those before the slices, those in [begin, end) once for each
// slice, and those that need the results of all slices. A short prompt has one slice.
//
// The search for sliced values starts at the steps that know the tokens' axis (attention). A step
// that takes or makes a sliced value is sliced too, with all inputs and outputs in its Slicing. If
// a step does not allow this, prompts are not sliced at all.
struct Schedule {
  std::vector<std::size_t> order;
  std::size_t begin = 0;
  std::size_t end = 0;
  // Names of the values that are sliced, including inputs of the partition.
  std::unordered_set<std::string> sliced;
  // Names of the values that say where slices may be cut (Slicing::blocks).
  std::unordered_set<std::string> blocks;
  // The reason why no step is run in slices; empty if some are.
  std::string reason;
};

// `nodes` in topological order; `steps`: prepared from these, in the same order.
Schedule make_schedule(std::span<const Node> nodes, std::span<const std::unique_ptr<Step>> steps);

}  // namespace flownpu
