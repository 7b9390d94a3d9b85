// SPDX-License-Identifier: Apache-2.0
// The choice between the APIs.
#pragma once

#include <memory>

#include "ops/device.h"
#include "ops/gpu/context/context.h"

namespace flownpu::gpu {

// The device that the options name, with the API that they name. Throws GpuError where there is
// none.
std::shared_ptr<Context> open_context(const DeviceOptions& options);

}  // namespace flownpu::gpu
