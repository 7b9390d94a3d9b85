// SPDX-License-Identifier: Apache-2.0
// Nodes as an ONNX model: the bytes that a session of ONNX Runtime's is made of.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ops/nodes/node.h"

namespace flownpu {

// Domains and their versions.
using OperatorSets = std::vector<std::pair<std::string, std::int64_t>>;

// A ModelProto of `nodes`, in topological order. `inputs` and `outputs` name values of theirs,
// whose types it has and whose shapes it leaves open, but for those of `constants`: these are
// inputs as well, so that a caller passes them from where they are. Throws Error if a name is none
// of the nodes' values.
std::string onnx_model(const std::vector<Node>& nodes, const std::vector<std::string>& inputs,
                       const std::vector<std::string>& outputs,
                       const std::set<std::string>& constants, const OperatorSets& opsets);

}  // namespace flownpu
