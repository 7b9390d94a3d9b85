// SPDX-License-Identifier: Apache-2.0
// The one form of a sum that is normalised: exporters of PyTorch's graphs write an Add and a norm,
// those for ONNX Runtime one operator.
#pragma once

#include <vector>

#include "ops/nodes/node.h"

namespace flownpu::npu {

// The nodes, in which each Add of two computed values and the first norm that reads it are a
// SkipSimplifiedLayerNormalization:
//
//   s = Add(a, b), y = SimplifiedLayerNormalization(s, w)  ->  y, s = Skip..(a, b, w)
//
// `nodes` in topological order. Values of other ranks than 3 stay, since the operator does not
// broadcast; where a rank is unknown, its kernel refuses such values.
std::vector<Node> with_residual_norms(std::vector<Node> nodes);

}  // namespace flownpu::npu
