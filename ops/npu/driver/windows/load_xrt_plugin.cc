// SPDX-License-Identifier: Apache-2.0
#include "ops/npu/driver/runtime.h"
#include "ops/npu/driver/xrt_plugin.h"

namespace flownpu::npu {

namespace {

[[noreturn]] void refuse() {
  throw DeviceError(Failure::kVersion,
                    "[FlowNPU] device 'npu': expected Linux, got Windows, where FlowNPU does not "
                    "drive an NPU yet; use device = cpu");
}

}  // namespace

void require_npu_system() { refuse(); }

const xrt_abi::Table& load_xrt_plugin(std::string /*file*/) { refuse(); }

}  // namespace flownpu::npu
