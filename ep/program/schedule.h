// SPDX-License-Identifier: Apache-2.0
// Schedule: which steps of a program are run slice after slice when a prompt is long.
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

// The steps in the order to run them: those before the slices, those of [begin, end) once for each
// slice, and those that need what all slices made. For a short prompt there is one slice.
//
// Sliced values are found from the steps that know where tokens are (attention) outwards: a step
// that takes or makes one must take and make all it lists in its Slicing in slices. Whatever cannot
// be told keeps the prompt whole.
struct Schedule {
  std::vector<std::size_t> order;
  std::size_t begin = 0;
  std::size_t end = 0;
  // Names of the values that are sliced; the inputs of the program among them are cut.
  std::unordered_set<std::string> sliced;
  // Names of the values that tell where slices may be cut (Slicing::blocks).
  std::unordered_set<std::string> blocks;
  // Why no step is run in slices; empty if some are.
  std::string reason;
};

// `nodes` in topological order, `steps` made of them.
Schedule make_schedule(std::span<const Node> nodes, std::span<const std::unique_ptr<Step>> steps);

}  // namespace flownpu
