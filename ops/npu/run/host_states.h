// SPDX-License-Identifier: Apache-2.0
// The host's operator for layers that keep a state (aie/programs/host.py).
#pragma once

#include <memory>

#include "ops/npu/run/host_call.h"

namespace flownpu::npu {

std::unique_ptr<HostOperator> make_mixer(const HostCallReader& reader);

}  // namespace flownpu::npu
