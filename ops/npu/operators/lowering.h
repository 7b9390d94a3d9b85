// SPDX-License-Identifier: Apache-2.0
// Which nodes of a partition the array computes by themselves, after whole decoders and encoders
// were looked for.
#pragma once

#include <cstdint>
#include <string>

#include "ops/device.h"
#include "ops/npu/artifacts/index.h"

namespace flownpu::npu {

// Gives those nodes to the array for which there are programs, and of which a run may be worth a
// dispatch, which is `threshold` multiply-adds. Nodes without programs keep the reason for which
// they were left, or get one. But if a decoder or an encoder was found, dense products need no
// reason: the host computes those around it. The summary says what is on the array, and what is too
// small for it.
void lower_operators(Lowered& lowered, const Artifacts& artifacts, std::int64_t threshold);

// Leaves all operators on the host for one reason, which with `better` replaces a reason that a
// node has.
void leave_operators(Lowered& lowered, const std::string& reason, bool better);

}  // namespace flownpu::npu
