// SPDX-License-Identifier: Apache-2.0
// The runtime of a real NPU: XRT, through the plugin libflownpu_xrt.so, which is loaded here.
//
// No NPU has run it: it is tested over Debian's XRT, below which a double of the kernel's driver
// computes with the emulator (tests/npu/xdna_driver/).
#pragma once

#include <memory>
#include <string>

#include "ops/npu/driver/runtime.h"

namespace flownpu::npu {

// Opens the first NPU that XRT finds. `plugin`: another file than libflownpu_xrt.so beside this
// library. Throws DeviceError: kVersion if there is no plugin, no XRT, or one of them is too old;
// kNoDevice; kPermission.
std::unique_ptr<Runtime> open_xrt_runtime(const std::string& plugin = "");

}  // namespace flownpu::npu
