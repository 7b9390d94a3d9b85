// SPDX-License-Identifier: Apache-2.0
// Chooses the single operators of a partition for the array, after the search for whole decoders
// and encoders.
#pragma once

#include <cstdint>
#include <string>

#include "ops/device.h"
#include "ops/npu/artifacts/index.h"
#include "ops/npu/match/array_operator.h"

namespace flownpu::npu {

// Gives a node to the array if there are programs for it, and if a run may have the threshold's
// multiply-adds. Nodes without programs keep their reason or get one.
// Dense products around a decoder or an encoder need no reason: the host computes them. The summary
// lists the nodes on the array and those too small for it.
void lower_operators(Lowered& lowered, const Artifacts& artifacts, const Threshold& threshold);

// Leaves all operators on the host for one reason. With `better` it replaces existing reasons.
void leave_operators(Lowered& lowered, const std::string& reason, bool better);

}  // namespace flownpu::npu
