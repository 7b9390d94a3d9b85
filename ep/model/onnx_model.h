// SPDX-License-Identifier: Apache-2.0
// Serialises nodes as an ONNX model, from which an ONNX Runtime session can be made.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ops/nodes/node.h"

namespace flownpu {

// Domains and the versions that a model imports of them.
using OperatorSets = std::vector<std::pair<std::string, std::int64_t>>;

// The bytes of a ModelProto with `nodes`, in topological order. `inputs` and `outputs` are names of
// the nodes' values; the model declares their types, but shapes only for `constants`. These must be
// among `inputs`, so that a caller passes constants without copying them into the model. Throws
// Error if a name is not that of a value of the nodes.
std::string onnx_model(const std::vector<Node>& nodes, const std::vector<std::string>& inputs,
                       const std::vector<std::string>& outputs,
                       const std::set<std::string>& constants, const OperatorSets& opsets);

}  // namespace flownpu
