// SPDX-License-Identifier: Apache-2.0
// Stand-ins for the NPU and its emulator in a build without them.
#include "ops/npu/npu_device.h"

#include "ops/device.h"
#include "ops/error.h"

namespace flownpu {

bool npu_built_in() { return false; }

std::unique_ptr<Device> make_npu_device(const DeviceOptions& /*options*/) {
  fail("[FlowNPU] device 'npu' was not built into this library; use device = cpu, or auto");
}

std::unique_ptr<Device> make_emulate_device(const DeviceOptions& /*options*/) {
  fail("[FlowNPU] device 'emulate' was not built into this library; use device = cpu, or auto");
}

}  // namespace flownpu
