// SPDX-License-Identifier: Apache-2.0
// Worth: which of the nodes that the CPU device could take stay with ONNX Runtime, because taking
// them would make the model slower. Only for sessions that leave nodes to ONNX Runtime anyway.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "ep/compile/capability.h"
#include "ops/device.h"

namespace flownpu {

// For each node, why it stays with ONNX Runtime, or "": as part of a quantised pattern that the
// device does not take whole, because ONNX Runtime fuses DequantizeLinear with the product that
// reads it, and a product alone would get a weight that is dequantised in each run; or as a
// convolution that ONNX Runtime computes faster. `cpu_isa`: the device's option.
std::vector<std::string> left_nodes(const Device& device, const std::vector<GraphNode>& nodes,
                                    std::string_view cpu_isa);

// Moves to `rejected` the partitions that have too little work to pay for the hand-over, but not a
// whole model without products, which takes as long there. `is_body`: of an If, Loop or Scan.
void leave_small(const std::vector<GraphNode>& nodes, Partitions& partitions, bool is_body);

}  // namespace flownpu
