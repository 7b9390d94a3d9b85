// SPDX-License-Identifier: Apache-2.0
// The host's operators for layers that keep a state, and for attention whose output has a gate
// (aie/programs/host.py).
#pragma once

#include <memory>

#include "ops/npu/run/host_call.h"

namespace flownpu::npu {

std::unique_ptr<HostOperator> make_mixer(const HostCallReader& reader);
std::unique_ptr<HostOperator> make_before_delta(const HostCallReader& reader);
std::unique_ptr<HostOperator> make_after_delta(const HostCallReader& reader);
std::unique_ptr<HostOperator> make_output_gate(const HostCallReader& reader);

}  // namespace flownpu::npu
