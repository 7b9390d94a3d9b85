// SPDX-License-Identifier: Apache-2.0
// The host's operators for mixtures of experts (aie/programs/host.py has their equations).
#pragma once

#include <memory>

#include "ops/npu/run/host_call.h"

namespace flownpu::npu {

// Each throws Error unless the record has the operator's parameters and sizes of buffers.
std::unique_ptr<HostOperator> make_experts_of_rows(const HostCallReader& reader);
std::unique_ptr<HostOperator> make_route(const HostCallReader& reader);
std::unique_ptr<HostOperator> make_add_experts(const HostCallReader& reader);

}  // namespace flownpu::npu
