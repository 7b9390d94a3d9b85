// SPDX-License-Identifier: Apache-2.0
// Which nodes of a partition the array computes by themselves, after whole decoders and encoders.
#pragma once

#include <cstdint>
#include <string>

#include "ops/device.h"
#include "ops/npu/artifacts/index.h"

namespace flownpu::npu {

// Gives nodes to the array for which there are programs, and that may be worth a dispatch:
// `threshold` multiply-adds. Nodes for which there are none keep the reason that they are left for,
// or get one, unless a decoder or an encoder was found: beside that the host computes what is left
// of dense products. The summary says what is on the array, and what is too little for it.
void lower_operators(Lowered& lowered, const Artifacts& artifacts, std::int64_t threshold);

// All stay on the host for one reason; with `better` it takes the place of those that they have.
void leave_operators(Lowered& lowered, const std::string& reason, bool better);

}  // namespace flownpu::npu
